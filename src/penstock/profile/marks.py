"""Marks: seconds on a device that queues, by marks on its stream that are read when all is over.

A clock of the host says how long an op took to queue.  Marks around it say how long the device was
at it - and how long it had nothing to do before, where the host is slower.  So the device is given
enough to do before: it sweeps memory, more than its cache holds, as long as the host takes to queue
what is timed.
"""

import time
from collections.abc import Callable
from typing import Any, final

import torch

from penstock.device import Device

_SWEPT_BYTES = 1 << 25  # more than the caches of a core hold
_SHARE = 8  # of a device's memory, what is swept at most
_SWEEPS = 16  # that are timed to know how long one takes
_MOST_SWEEPS = 512  # at once: drivers keep about a thousand ops, and the host waits beyond
OPS_AHEAD = 256  # that are queued behind one sweep


@final
class Mark:
    """A moment of a device's stream; the difference of two is known later."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, device.mark()

    def __sub__(self, start: "Mark") -> "Between":
        return Between(start, self)


@final
class Between:
    """The time between two marks; `float` waits until it is over, and gives it in seconds."""

    def __init__(self, start: Mark, end: Mark) -> None:
        self.start, self.end = start, end

    def __float__(self) -> float:
        return self.end.device.seconds_between(self.start.at, self.end.at)


@final
class Sweep:
    """Memory that is swept before something is timed.

    ahead:   lets a device that queues be busy for so many seconds; nothing on others.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        size_bytes = 2 * device.cache_bytes or _SWEPT_BYTES
        if device.is_queued:
            size_bytes = min(size_bytes, device.usable_bytes // _SHARE)
        self._memory = torch.zeros(size_bytes // 4, device=device.place)
        self._once_s = 0.0

    def __call__(self) -> None:
        self._memory.add_(1.0)

    def ahead(self, seconds: float) -> None:
        if not self.device.is_queued:
            return
        self._once_s = self._once_s or self._timed()
        for _ in range(min(_MOST_SWEEPS, 1 + int(seconds / self._once_s))):
            self()

    def _timed(self) -> float:
        self()
        start = self.device.mark()
        for _ in range(_SWEEPS):
            self()
        return max(1e-7, self.device.seconds_between(start, self.device.mark()) / _SWEEPS)


def clock_of(device: Device) -> Callable[[], Any]:
    """Return a clock: what it gives later, less what it gave before, is seconds as a float.

    On a CPU it is the thread's own time.
    """
    return (lambda: Mark(device)) if device.is_queued else time.thread_time
