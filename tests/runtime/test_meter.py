"""A meter keeps the sums of few windows, the same ones on every rank."""

from types import SimpleNamespace
from typing import cast

import pytest

from penstock.runtime import meter
from penstock.runtime.calls import Bound
from penstock.runtime.meter import Meter
from penstock.transport import Transport


def bound(lane: str, ranks: tuple[int, ...] = (), kind: str = "") -> Bound:
    return cast("Bound", SimpleNamespace(lane=lane, ranks=ranks, kind=kind))


def taken() -> Bound:
    about = {"lane": "take", "ranks": (1,), "kind": "", "edge": 0, "micro_batch": 0}
    return cast("Bound", SimpleNamespace(**about))


CALLS = (
    bound("collective", (0, 1)),
    bound("compute", kind="F"),
    bound("collective", (0, 1)),
    bound("collective", (0, 1, 2)),
)


def metered(windows: int) -> Meter:
    """Return a meter of windows of five steps of the clock, n times as long in the n-th one."""
    waited = SimpleNamespace(to_receive_s=0.0, to_send_s=0.0)
    one = Meter(cast("Transport", SimpleNamespace(rank=0, waited=waited)))
    for n in range(windows):
        one.window(CALLS, [0.0, 1.0 * n, 3.0 * n, 7.0 * n, 15.0 * n], 1)
    return one


@pytest.mark.parametrize(("windows", "every"), [(1, 1), (8, 1), (9, 2), (17, 4), (64, 8), (65, 16)])
def test_few_windows_are_kept_evenly(
    windows: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "_MOST_WINDOWS", 8)
    one = metered(windows)
    both, every_rank = one.spent(0.0, CALLS, [0.0] * 5, 1).meetings
    numbers = range(0, windows, every)
    assert (both.ranks, every_rank.ranks) == ((0, 1), (0, 1, 2))
    assert both.sample_s == tuple(s for n in numbers for s in (1.0 * n, 4.0 * n))
    assert every_rank.sample_s == tuple(8.0 * n for n in numbers)
    assert both.total_s == sum(5.0 * n for n in range(windows))


def test_windows_without_sums_count_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else ranks whose programs differ would keep other windows."""
    monkeypatch.setattr(meter, "_MOST_WINDOWS", 4)
    waited = SimpleNamespace(to_receive_s=0.0, to_send_s=0.0)
    one = Meter(cast("Transport", SimpleNamespace(rank=0, waited=waited)))
    alone, both = (bound("compute", kind="F"),), (bound("collective", (0, 1)),)
    for n in range(12):
        one.window(both if n % 3 == 0 else alone, [0.0, float(n)], 1)
    (met,) = one.spent(0.0, both, [0.0, 0.0], 1).meetings
    assert met.sample_s == (0.0,)  # of windows 0, 4 and 8, the one with a sum
    assert met.total_s == 0 + 3 + 6 + 9


def test_what_a_rank_clips_alone_is_part_of_its_update() -> None:
    waited = SimpleNamespace(to_receive_s=0.0, to_send_s=0.0)
    one = Meter(cast("Transport", SimpleNamespace(rank=0, waited=waited)))
    calls = (bound("collective", (0,)), bound("update"))
    one.window(calls, [0.0, 1.0, 3.0], 1)
    spent = one.spent(3.0, calls, [0.0, 1.0, 3.0], 1)
    assert dict(spent.parts)["optimizer"] == 3.0
    assert spent.meetings == ()


def test_what_is_waited_for_inside_a_call_is_counted_once() -> None:
    """A sum of four seconds, of which three are spent on a message: no message of the step's."""
    waited = SimpleNamespace(to_receive_s=0.0, to_send_s=0.0)
    one = Meter(cast("Transport", SimpleNamespace(rank=0, waited=waited)))

    def exchange() -> None:
        waited.to_receive_s, waited.to_send_s = waited.to_receive_s + 2.0, waited.to_send_s + 1.0

    one.inside(exchange)()
    waited.to_receive_s += 0.5  # for a message of the step itself
    calls = (bound("collective", (0, 1)), bound("settle"))
    one.window(calls, [0.0, 4.0, 4.5], 1)
    parts = dict(one.spent(4.5, calls, [0.0, 4.0, 4.5], 1).parts)
    assert parts["waiting"] == 0.5
    assert parts["messages"] == 0.0


def test_steps_are_divided_by_the_clock_of_a_device_where_it_has_one() -> None:
    """Of each of six steps of 14 s the device computes for 4 of 7, and waits for 2 and for 1."""
    waited = SimpleNamespace(to_receive_s=0.0, to_send_s=0.0)
    one = Meter(cast("Transport", SimpleNamespace(rank=0, waited=waited)))
    calls = (bound("compute", kind="F"), taken(), bound("collective", (0, 1)))
    for _ in range(6):
        one.window(calls, [0.0, 0.1, 0.2, 14.0], 1)
    typical = [meter.DeviceWindow(calls, [8.0, 12.0, 14.0, 15.0], 1)] * 2
    one.of_device(typical)
    spent = one.spent(90.0, calls, [8.0, 12.0, 14.0, 15.0], 1)
    parts = dict(spent.parts)
    assert (parts["F"], parts["waiting"], parts["messages"]) == (48.0, 24.0, 0.0)
    (met,) = spent.meetings
    assert (met.total_s, met.sample_s) == (12.0, (1.0, 1.0))
