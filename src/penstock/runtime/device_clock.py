"""Device clock: when a device that queues was at each call of a window, by marks on its streams.

The host's clock says when a call was queued.  Marks between calls, and around what runs on a stream
beside them, are read when the run is over; one moment is known by both clocks.  A few windows are
marked, for a mark costs about a microsecond.
"""

import time
from collections.abc import Sequence
from typing import Any, final

from penstock.device import Device

MARKED = 8  # windows


@final
class DeviceClock:
    """Tells what the host's clock showed when a device came to marks; it waits for it once, now."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.synchronize()
        self._at_s, self._mark = time.perf_counter(), device.mark()

    def seconds_of(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds of marks, which are near to each other."""
        between, first = self._device.seconds_between, marks[0]
        start_s = self._at_s + between(self._mark, first)
        return [start_s, *(start_s + between(first, mark) for mark in marks[1:])]
