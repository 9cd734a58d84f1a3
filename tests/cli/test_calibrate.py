"""penstock doctor --calibrate: entries of the device and its link, each with its interval."""

import json
import time
from pathlib import Path

import pytest

from penstock.cli import calibrate as command
from penstock.cli.calibrate import document, measured, shares, words
from penstock.cluster import Cluster
from penstock.device import here
from penstock.gauge import calibrate
from penstock.gauge.calibrate import Calibrated, OpTask, calibrated, rates_by_turns, tasks_on
from penstock.gauge.links import Overlapped, Probe, Timing
from tests.cli.conftest import Call

UNITS = {
    "product float32": "FLOP/s", "convolution": "FLOP/s", "attention": "FLOP/s",
    "reduction": "bytes/s", "gather": "bytes/s", "element-wise": "bytes/s", "copy": "bytes/s",
    "launch": "s",
}  # fmt: skip
RATES = tuple(
    Calibrated(what, unit, 1e10 * (at + 1), 0.9e10 * (at + 1), 1.2e10 * (at + 1), 9)
    for at, (what, unit) in enumerate(UNITS.items())
)
TIMINGS = tuple(
    Timing(size, 1e-5 + size / 1e9, 2e-5 + size / 0.9e9, 4e-5 + size / 0.5e9, 0.0)
    for size in (64, 4096, 2**20, 2**23)
)
PROBE = Probe(TIMINGS, Overlapped(1.0, 0.1, 1.0, 1.0, 1.1, 0.0))


def test_every_class_of_ops_has_a_task_that_does_what_it_counts() -> None:
    tasks = {task.what: task.unit for task in tasks_on(here())}
    assert tasks == UNITS
    amounts = {task.what: task.amount for task in tasks_on(here())}
    read = amounts["reduction"]
    moved = [amounts[what] / read for what in ("gather", "copy", "element-wise")]
    assert moved == [2, 2, 3]


def test_rates_lie_inside_their_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ROUND_S", 1e-4)
    monkeypatch.setattr(calibrate, "_MOVED_BYTES", 2**20)
    found = calibrated(0.1)
    assert [rate.what for rate in found] == list(UNITS)
    for rate in found:
        assert 0 < rate.low <= rate.value <= rate.high
        assert rate.rounds >= 7


def test_a_task_twice_as_long_has_half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a task moves: what is counted is its own."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def rate(seconds: float) -> float:
        def run() -> None:
            now[0] += seconds

        task = OpTask("a task", "bytes/s", run, 100.0)
        (found,) = rates_by_turns([task], here(), 1.0)
        return found.value

    assert rate(0.01) == pytest.approx(2 * rate(0.02)) == pytest.approx(1e4)


def test_what_disturbs_the_machine_for_a_while_disturbs_all_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes three times as fast for a while."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run() -> None:
        now[0] += 0.03 if 1.0 < now[0] < 6.0 else 0.01

    tasks = [OpTask(f"task {n}", "FLOP/s", run, 100.0) for n in range(5)]
    found = rates_by_turns(tasks, here(), 2.0)
    assert [rate.value for rate in found] == pytest.approx([1e4] * 5)
    assert [rate.low for rate in found] == pytest.approx([1e4 / 3] * 5)


def test_no_class_of_ops_is_above_the_peak() -> None:
    assert max(shares(RATES).values()) == 1


def test_the_device_has_the_peaks_that_were_measured() -> None:
    found = measured(Cluster.here(2), RATES, PROBE.link)
    (device,) = found.devices
    assert device.flop_per_s == (("float32", 3e10),)  # of attention, here
    assert device.memory_bytes_per_s == 7e10  # of the copy
    assert found.inside == PROBE.link
    assert shares(RATES)["attention"] == 1
    assert shares(RATES)["convolution"] == pytest.approx(2 / 3)
    assert shares(RATES)["reduction"] == pytest.approx(4 / 7)
    assert "launch" not in shares(RATES)


def test_entries_have_intervals_in_both_forms() -> None:
    found = document(measured(Cluster.here(2), RATES, PROBE.link), RATES, PROBE)
    assert json.loads(json.dumps(found)) == found
    for rate in found["rates"]:
        assert rate["low"] < rate["value"] < rate["high"]
    for figure in found["link"].values():
        assert 0 < figure["low"] < figure["high"]
    text = words(RATES, PROBE)
    assert "10 GFLOP/s" in text
    assert "70 GB/s" in text
    assert "between two ranks: " in text
    assert "no link" in words(RATES, None)


def test_command_writes_a_cluster(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(calibrate, "calibrated", lambda budget_s: RATES)
    monkeypatch.setattr(command, "_link", lambda: PROBE)
    out = tmp_path / "here.toml"
    document = json.loads(call("doctor", "--calibrate", "--out", out, "--json").out)
    assert document["flop_per_s"] == {"float32": 3e10}
    assert Cluster.load(out).devices[0].memory_bytes_per_s == 7e10


def test_links_alone_and_a_region_are_refused(call: Call) -> None:
    for more in ("--links",), ("--region", "east"):
        error, hint = call("doctor", "--calibrate", *more).refusal(2)
        assert error
        assert hint
