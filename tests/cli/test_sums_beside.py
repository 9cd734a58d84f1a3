"""penstock doctor --overlap: what is shown, what is kept, and who uses it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import sums_beside as command
from penstock.cluster import Cluster, Host, Link
from penstock.files import cache_folder
from penstock.gauge import links
from penstock.gauge.sum_beside import sums_of
from penstock.listener import SILENT
from penstock.profile.kept_profiles import kept_link
from tests.cli.conftest import Call

LINK = Link(2e-5, 5e9, 1e-5, 1e10)
SIZES = (2**19, 2**20, 2**21)


def told(spread: float = 0.01) -> list[object]:
    """Return what two ranks tell: a sum takes 1 GB/s and a whole core, computes 1.5 times."""

    def tenths(seconds: float) -> list[float]:
        return [seconds, seconds * (1 - spread), seconds * (1 + spread)]

    rows = []
    for size in SIZES:
        taken_s = size / 1e9
        ways = [tenths(times * taken_s) for times in (1.5, 1.0, 2.5, 2.5)]
        rows.append([size, ways, 1.6 * taken_s])
    return rows


@pytest.fixture
def two_ranks(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let two ranks tell so, and a cache of this test's own keep it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(command, "_of_this_host", told)
    monkeypatch.setattr(links, "measure_link", lambda: LINK)


def test_tables_have_each_way_and_the_size_held_out(call: Call, two_ranks: None) -> None:
    shown = call("doctor", "--overlap").out
    assert max(map(len, shown.splitlines()[:10])) <= 80
    for word in "512 KiB", "1.05 ms +-1 %", "predicted", "kept for runs here", "of a core":
        assert word in shown, word
    assert "disturbed" not in shown


def test_unlike_times_of_the_same_computes_are_called_disturbed(
    call: Call, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_of_this_host", lambda: told(0.3))
    assert "disturbed: " in call("doctor", "--overlap").out


def test_document_has_the_figures_and_the_prediction(call: Call, two_ranks: None) -> None:
    found = json.loads(call("doctor", "--overlap", "--json").out)
    assert [row["size_bytes"] for row in found["sizes"]] == list(SIZES)
    for row in found["sizes"]:
        assert row["predicted_s"] == pytest.approx(row["at_once"]["median_s"])
        assert row["gain"] == pytest.approx(0.0)
        assert row["slowdown"] == pytest.approx(1 / 15)
    assert found["core"]["core_bytes_per_s"] == pytest.approx(1e9)
    assert found["disturbed"] is False


def test_what_was_measured_is_what_runs_here_take(
    call: Call, two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the link that is kept, and measure none."""
    from penstock.choose.prepare import machines

    assert call("doctor", "--overlap").code == 0
    kept = kept_link(cache_folder("profiles"), lambda path: None)
    assert kept is not None
    monkeypatch.setattr(links, "measure_link", None)
    assert machines(None, 2, SILENT).inside == kept
    assert kept.core_bytes_per_s == pytest.approx(1e9)


def test_a_file_that_is_there_gets_what_was_measured_and_keeps_the_rest(
    call: Call, two_ranks: None, tmp_path: Path
) -> None:
    out, old = tmp_path / "cluster.toml", replace(Cluster.here(2), inside=Link(1.0, 7e6))
    old.save(out)
    assert call("doctor", "--overlap", "--out", out).code == 0
    found = Cluster.load(out)
    assert found.inside is not None
    assert (found.inside.latency_s, found.inside.bytes_per_s) == (1.0, 7e6)
    assert found.inside.core_bytes_per_s == pytest.approx(1e9)
    out.unlink()
    assert call("doctor", "--overlap", "--out", out).code == 0
    assert Cluster.load(out).inside == kept_link(cache_folder("profiles"), lambda path: None)


@pytest.mark.parametrize(("region", "level"), [("here", "between"), ("there", "across")])
def test_under_torchrun_the_link_of_the_two_hosts_gets_it(
    region: str, level: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    here = Cluster.here(2)
    hosts = here.hosts[0], Host("other", here.hosts[0].device, 2, region)
    cluster = replace(here, hosts=hosts, inside=LINK, **{level: LINK})
    out = tmp_path / "cluster.toml"
    cluster.save(out)
    measured = command._added(out, sums_of(told()), None)
    assert getattr(measured, level).core_bytes_per_s == pytest.approx(1e9)
    assert measured.inside == LINK


def test_what_does_not_go_together_is_refused(call: Call) -> None:
    for more in ("--links",), ("--calibrate",), ("--region", "east"):
        error, hint = call("doctor", "--overlap", *more).refusal(2)
        assert error
        assert hint
