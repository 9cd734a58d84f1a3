"""penstock doctor: what this machine has, and what is missing."""

import json
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.cli.doctor import LIBRARIES, examine
from penstock.cli.links import computing, inside_words, matrix, regions_words
from penstock.cluster import Cluster, DeviceKind, Host
from penstock.cluster.machine import cpu_name, detect
from penstock.device import Device
from penstock.gauge import joules
from penstock.gauge.benchmark import Benchmark
from penstock.gauge.hosts import Compared, Survey, slowest
from penstock.gauge.joules import JouleMeter
from penstock.gauge.links import Overlapped, Probe, Timing
from tests.cli.conftest import Call


def test_doctor_finds_this_machine_fit_and_says_what_it_has(call: Call) -> None:
    done = call("doctor", "--json")
    document = json.loads(done.out)
    found = {finding["what"]: finding["value"] for finding in document["findings"]}
    assert (done.code, done.err, document["ok"]) == (0, "", True)
    assert found["python"].startswith(platform.python_version())
    assert found["torch"] == torch.__version__
    assert found["cores"].split()[0] == str(detect().cores)
    assert found["processor"] == cpu_name()
    others = "memory", "energy", "processes", "shared memory", "gloo", "NCCL"
    assert {*LIBRARIES, *others} <= found.keys()


def test_doctor_says_in_one_line_what_tells_joules_or_why_nothing_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = JouleMeter("package-0", lambda: 1.0, 100.0)
    for found, state, words in (
        ([meter], "ok", "package-0"),
        ([], "note", "nothing tells: there is"),
    ):
        monkeypatch.setattr(joules, "meters", lambda found=found: found)
        (line,) = [each for each in examine() if each.what == "energy"]
        assert line.state == state
        assert words in line.value


def test_doctor_for_people_shows_the_same_and_a_verdict(call: Call) -> None:
    document, done = json.loads(call("doctor", "--json").out), call("doctor")
    assert (done.code, done.err) == (0, "")
    for finding in document["findings"]:
        words = f"{finding['what']} {finding['state']} {finding['value']}"
        assert words.split() in [line.split() for line in done.out.splitlines()]
        assert finding["hint"] in done.out
    assert done.out.endswith("Training works here.\n")


def test_what_is_missing_ends_in_exit_code_one_with_a_hint(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # its import now fails
    done = call("doctor")
    assert done.code == 1
    assert done.out.endswith("Training cannot work here.\n")
    assert "torch: pip install torch" in done.out
    assert json.loads(call("doctor", "--json").out)["ok"] is False


def test_missing_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cli.doctor.LIBRARIES", ("no_such_library",))
    found = {finding.what: finding for finding in examine()}
    assert found["no_such_library"].state == "missing"
    assert found["no_such_library"].hint == "pip install no_such_library"


def test_look_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such machine")

    monkeypatch.setattr("penstock.cli.doctor.detect", broken)
    found = {finding.what: finding for finding in examine()}
    assert found["machine"].state == "missing"
    assert "no such machine" in found["machine"].value
    assert "gloo" in found


def test_folder_for_profiles_that_cannot_be_used_is_only_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = {finding.what: finding for finding in examine()}
    assert found["profiles"].state == "note"
    assert "XDG_CACHE_HOME" in found["profiles"].hint


@pytest.mark.parametrize("name", ["new", "penstock"])
def test_doctor_does_not_mind_what_others_keep_in_the_temporary_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = {finding.what: finding for finding in examine()}
    assert found["temporary files"].state == "ok"


def test_shared_memory_that_does_not_work_is_a_note_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = "penstock.transport.shared_memory.available"
    monkeypatch.setattr(place, lambda: (False, "no futex"))
    found = {finding.what: finding for finding in examine()}
    assert (found["shared memory"].state, found["shared memory"].value) == ("note", "no futex")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (b"processor\t: 0\nmodel name\t: Fast 9\n", "Fast 9"),
        (b"processor\t: 0\n", ""),
        (b"\xff", ""),
    ],
)
def test_processor_is_named_by_itself_or_by_its_architecture(
    tmp_path: Path, lines: bytes, name: str
) -> None:
    (tmp_path / "cpuinfo").write_bytes(lines)
    expected = name or platform.processor() or platform.machine()
    assert cpu_name(tmp_path / "cpuinfo") == expected
    assert cpu_name(tmp_path / "nowhere") == platform.processor() or platform.machine()


def test_doctor_measures_links_and_writes_a_cluster(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timings = tuple(Timing(size, 1e-5 + size * 1e-9, 1e-3, 1e-2, 2e-6) for size in (64, 4096))
    found = Probe(timings, Overlapped(1.0, 1.0, 1.2, 1.9, 2.0, 0.01))
    monkeypatch.setattr("penstock.gauge.links.probe_here", lambda: found)
    file = tmp_path / "cluster.toml"
    done = call("doctor", "--links", "--out", file, "--region", "east")
    assert (done.code, done.err) == (0, f"wrote {file}\n")
    cluster = Cluster.load(file)
    assert cluster.inside == found.link
    assert cluster.inside is not None
    assert cluster.inside.slowdown == pytest.approx(0.2)
    assert [host.region for host in cluster.hosts] == ["east"]
    assert str(cluster) in done.out
    assert "at once 1.90 s: 5 % less" in done.out
    assert "computes beside messages 1.20 s: +20.0 %" in done.out
    document = json.loads(call("doctor", "--links", "--json").out)
    assert document["links"]["inside"]["overlap"] == found.to_json()["overlap"]
    assert document["links"]["inside"]["link"]["copy_bytes_per_s"] is None  # infinite
    assert [host["region"] for host in document["hosts"]] == ["here"]


@pytest.mark.parametrize("flag", ["--out", "--region"])
def test_what_is_for_links_is_refused_without_them(call: Call, tmp_path: Path, flag: str) -> None:
    error, hint = call("doctor", flag, tmp_path / "x").refusal(2)
    assert error == f"{flag} is for links"
    assert "--links" in hint


def test_place_where_no_cluster_can_be_written_is_told_before_links_are_measured(
    call: Call, tmp_path: Path
) -> None:
    assert call("doctor", "--links", "--out", tmp_path).refusal(1)[0].endswith("Is a directory")


def test_hosts_are_shown_pair_by_pair() -> None:
    cells = [Compared((0, 1), 1e-3, 1e-3 + 2e-2), Compared((0, 2), 1e-3, 1e-3 + 1e-2)]
    shown = matrix(["a", "b", "c"], cells).splitlines()
    assert shown[0].split() == ["between", "a", "b", "c"]
    assert "1.00 ms + 0.0262 GB/s" in shown[1]
    assert "0.0524 GB/s" in shown[1]
    assert shown[2].count("GB/s") == 1


def test_regions_are_told_with_how_far_they_are_and_beside_those_that_are_named() -> None:
    hosts = tuple(Host(name, "d", 1, region) for name, region in zip("abc", "xxy", strict=True))
    cluster = Cluster((DeviceKind("d", 1, (), 1.0),), hosts)
    near, far = (1e-4, 1e-4 + 2**19 * 1e-9), (1e-3, 1e-3 + 2**19 * 1e-7)
    rows = tuple(
        Compared(pair, *took) for pair, took in (((0, 1), near), ((0, 2), far), ((1, 2), far))
    )
    tasks = (Benchmark(1e-11, 1e-10, 2e-6),) * 3
    found = Survey(cluster, rows, (), tasks, ((0, 1), (2,)))
    times = rows[1].capability / rows[0].capability
    assert times == pytest.approx(85, rel=0.1)
    told = regions_words(found).splitlines()
    assert told == ["2 regions: a, b; c", f"between them a byte takes {times:.3g} times as long"]
    other = replace(found, near=((0,), (1, 2)))
    assert regions_words(other).splitlines()[-1] == "--region says otherwise, and counts"
    assert regions_words(replace(found, near=((0, 1, 2),))).startswith("one region:")
    line = computing(cluster, tasks).splitlines()[1]
    assert line.split() == ["a", "100", "GFLOP/s", "10", "GB/s", "2.00", "us", "142", "ms", "d"]


def test_pairs_of_accelerators_are_shown_with_what_seems_to_connect_them(monkeypatch) -> None:
    class Pair:
        def can_device_access_peer(self, one: int, other: int) -> bool:
            return {one, other} != {0, 2}

    monkeypatch.setattr(Device, "_of_kind", Pair())
    gpus = tuple(Device("cuda", index) for index in range(3))
    monkeypatch.setattr("penstock.device.all_here", lambda: gpus)
    sizes, small_s = (0, 10**9), 1e-5
    rates = {(0, 1): 300e9, (1, 2): 25e9, (0, 2): 10e9}
    cells = [Compared(pair, small_s, small_s + 1e9 / each, sizes) for pair, each in rates.items()]
    shown = [line.split(maxsplit=8) for line in inside_words(cells).splitlines()[1:]]
    assert [row[:3] for row in shown] == [["0", "and", "1"], ["1", "and", "2"], ["0", "and", "2"]]
    assert [row[8] for row in shown] == [
        "NVLink or the like",
        "PCIe, from peer to peer",
        "through the host's memory",
    ]
    assert slowest(cells) == (0, 2)
    assert slowest(()) is None
