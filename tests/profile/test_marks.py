"""Marks: what a device that queues tells of seconds, here one with a clock of its own."""

from dataclasses import dataclass, field

import pytest
import torch

from penstock.device import Device
from penstock.graph.trace import capture
from penstock.profile import measure
from penstock.profile.marks import Sweep, clock_of
from tests.graph.zoo import JOBS


@dataclass
class Queue:
    """A device whose marks are whole seconds, and whose ops take none."""

    now_s: float = 0.0
    waits: list[float] = field(default_factory=list)
    is_queued, cache_bytes, place = True, 64, torch.device("cpu")
    usable_bytes = 2**30

    def mark(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def seconds_between(self, start: float, end: float) -> float:
        self.waits.append(end)
        return end - start


def test_seconds_are_asked_for_when_all_is_queued() -> None:
    queue = Queue()
    clock = clock_of(queue)
    start = clock()
    taken = [clock() - start for _ in range(3)]
    assert queue.waits == []
    assert [float(each) for each in taken] == [1.0, 2.0, 3.0]


def test_cpu_tells_the_time_of_its_thread() -> None:
    clock = clock_of(Device("cpu"))
    assert isinstance(clock() - clock(), float)


def test_device_is_kept_busy_as_long_as_the_host_queues() -> None:
    """Sixteen sweeps take a second."""
    queue, swept = Queue(), list[int]()
    sweep = Sweep(queue)
    assert sweep._memory.nbytes == 2 * queue.cache_bytes
    sweep.ahead(0.0)  # that is when it is known what one takes
    before = int(sweep._memory[0])
    sweep.ahead(2.0)
    swept.append(int(sweep._memory[0]) - before)
    assert swept == [33]


@pytest.mark.parametrize(("whole", "scale", "begin"), [(2.0, 1.0, 1.0), (0.5, 0.5, 0.0)])
def test_what_a_phase_takes_beyond_its_ops_is_shared_alike(whole, scale, begin) -> None:
    """And where it takes less, what they took is too long."""
    captured = capture(JOBS["blocks"])
    nodes = captured.graph.nodes
    counts = {p: sum(n.kind == "op" and n.phase == p for n in nodes) for p in "FB"}
    each = [(n.kind == "op") / counts[n.phase] for n in nodes]  # a second in each phase
    found = measure._settled(captured, each, {"F": whole, "B": whole}, is_queued=True)
    for node, seconds in zip(nodes, found, strict=True):
        own = (scale + begin) / counts[node.phase] if node.kind == "op" else 0.0
        assert seconds == pytest.approx(own)
