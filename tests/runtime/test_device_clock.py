"""Device clock: marks of a device as seconds of the host's clock."""

from types import SimpleNamespace

import pytest

from penstock.runtime import device_clock
from penstock.runtime.device_clock import DeviceClock
from penstock.runtime.worker import _Ran


def test_marks_are_told_by_the_hosts_clock_and_sums_beside_the_calls(monkeypatch) -> None:
    """The device's own clock shows 100 s where the host's shows 7."""
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: 7.0)
    device = SimpleNamespace(
        synchronize=lambda: None,
        mark=lambda: 100.0,
        seconds_between=lambda start, end: end - start,
    )
    clock = DeviceClock(device)
    ran = _Ran((), [101.0, 102.0, 104.0], 1, [(101.5, 103.0), (103.0, 103.5)]).by(clock)
    assert ran.marks == pytest.approx([8.0, 9.0, 11.0])
    assert ran.summed == [pytest.approx((8.5, 10.0)), pytest.approx((10.0, 10.5))]
    assert _Ran((), [101.0], 1, []).by(clock).summed == []
