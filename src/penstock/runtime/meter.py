"""Meter: adds up the time between a rank's calls, over all windows of a run.

The clock is read anyway before and after each call; a window's differences are summed by what
the calls are for in one go (numpy), which takes some 50 ns a call.  Of
a device that queues some windows have marks of its own clock, by which all are divided in the end.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec

import numpy as np
from numpy.typing import NDArray

from penstock.runtime.calls import Bound
from penstock.timeline.breakdown import Part
from penstock.timeline.spent import Meetings, Sent, Spent, Taken
from penstock.transport.transport import Transport

Key = tuple[str, tuple[int, ...]]  # what a call is for, and of a sum the ranks that take part
Marks = Sequence[float]
_MOST_WINDOWS = 512  # of which the seconds of each sum are kept

Given = ParamSpec("Given")


class Meter:
    """The seconds of a rank's training loop, which begins when this is made."""

    def __init__(self, transport: Transport, *, has_server: bool = False) -> None:
        self.transport, self.has_server = transport, has_server
        self.start_s = time.perf_counter()
        self.num_steps = 0
        self.seconds: defaultdict[Key, float] = defaultdict(float)
        self.once_s = self.checkpoint_s = 0.0
        self.to_receive_s = self.to_send_s = 0.0
        self._seen_s = self._waited_s()
        self._places: dict[int, _CallPlaces] = {}
        self._sampled: list[dict[Key, NDArray[np.float64]]] = []
        self._num_windows, self._sampled_every = 0, 1

    def window(self, calls: Sequence[Bound], marks: Marks, num_steps: int) -> None:
        """Count a window that was run."""
        keys, places, meetings = self._places_of(calls)
        each_s = np.diff(marks)
        for key, seconds in zip(keys, np.bincount(places, each_s, len(keys)).tolist(), strict=True):
            self.seconds[key] += seconds
        self._sample({key: each_s[at] for key, at in meetings.items()})
        before, self._seen_s = self._seen_s, self._waited_s()
        self.to_receive_s += self._seen_s[0] - before[0]
        self.to_send_s += self._seen_s[1] - before[1]
        self.num_steps += num_steps

    def of_device(self, windows: "Sequence[DeviceWindow]") -> None:
        """Divide the seconds of all windows as a device divides some of them, not as the host's
        calls do, which only queue.

        Over a run the host, which waits once a step, takes as long as the device.  A wait for a
        message is the device's, between its marks.
        """
        shown_s = sum(window.marks[-1] - window.marks[0] for window in windows)
        scale = sum(self.seconds.values()) / shown_s if shown_s else 0.0
        self.seconds, self._sampled = defaultdict(float), []
        for calls, marks, _ in windows:
            keys, places, meetings = self._places_of(calls)
            each_s = np.diff(marks)
            sums = np.bincount(places, each_s, len(keys)) * scale
            for key, seconds in zip(keys, sums.tolist(), strict=True):
                self.seconds[key] += seconds
            self._sampled.append({key: each_s[at] for key, at in meetings.items()})
        self.to_receive_s, self.to_send_s = self.seconds["take", ()], 0.0

    def _sample(self, meetings: dict[Key, NDArray[np.float64]]) -> None:
        """Keep the sums of every n-th window, n doubled as they become many: alike on all ranks."""
        if self._num_windows % self._sampled_every == 0:
            self._sampled.append(meetings)
        self._num_windows += 1
        if len(self._sampled) > _MOST_WINDOWS:
            self._sampled, self._sampled_every = self._sampled[::2], 2 * self._sampled_every

    def once(self, seconds: float) -> None:
        """Count seconds that a longer run does not spend more often."""
        self.once_s += seconds
        self._seen_s = self._waited_s()

    def inside(self, call: Callable[Given, None]) -> Callable[Given, None]:
        """Return a call within another one: its messages are waited for as part of that one."""

        def run(*given: Given.args, **named: Given.kwargs) -> None:
            before = self._waited_s()
            call(*given, **named)
            waited = zip(self._seen_s, self._waited_s(), before, strict=True)
            receiving_s, sending_s = (seen + now - then for seen, now, then in waited)
            self._seen_s = receiving_s, sending_s

        return run

    @contextmanager
    def checkpoint(self, *, is_last: bool) -> Generator[None]:
        """Count what is done meanwhile as checkpoint writing; the last one as once."""
        start = time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        if is_last:
            self.once_s += seconds
        else:
            self.checkpoint_s += seconds

    def spent(self, end_s: float, calls: Sequence[Bound], marks: Marks, num_steps: int) -> Spent:
        """Return what was counted until `end_s`, with the messages of a typical window."""
        sent, taken = _messages(calls, marks)
        sending_s = self.seconds["send", ()]
        return Spent(
            num_steps=self.num_steps,
            wall_s=end_s - self.start_s,
            parts=tuple(self._parts().items()),
            meetings=tuple(
                Meetings(key[1], seconds, self._sample_of(key))
                for key, seconds in self.seconds.items()
                if key[0] == "collective"
            ),
            checkpoint_s=self.checkpoint_s,
            steps_sent=num_steps,
            sent=sent,
            taken=taken,
            free=1.0 - min(1.0, self.to_send_s / sending_s) if sending_s else 1.0,
        )

    def _parts(self) -> dict[Part, float]:
        """Return the parts that a rank knows by itself."""
        seconds, waiting_s = self.seconds, self.to_receive_s + self.to_send_s
        calls_s = sum(seconds[lane, ()] for lane in ("send", "take", "post", "settle"))
        return {
            "data": seconds["data", ()],
            "F": seconds["F", ()],
            "B": seconds["B", ()],
            "I": seconds["I", ()],
            "W": seconds["W", ()],
            "optimizer": seconds["update", ()] + seconds["versions", ()],
            "copies": seconds["copy", ()],
            "messages": max(0.0, calls_s - waiting_s),
            "waiting": waiting_s + seconds["turn", ()],
            "once": self.once_s,
        }

    def _sample_of(self, key: Key) -> tuple[float, ...]:
        rows = [window[key] for window in self._sampled if key in window]
        return tuple(np.concatenate(rows).tolist()) if rows else ()

    def _places_of(self, calls: Sequence[Bound]) -> "_CallPlaces":
        if id(calls) not in self._places:
            own = [_key(bound) for bound in calls]
            keys = list(dict.fromkeys(own))
            places = np.array([keys.index(key) for key in own], np.int64)
            meetings = {
                key: np.flatnonzero(places == at)
                for at, key in enumerate(keys)
                if key[0] == "collective"
            }
            self._places[id(calls)] = _CallPlaces(keys, places, meetings)
        return self._places[id(calls)]

    def _waited_s(self) -> tuple[float, float]:
        if self.has_server:  # whose threads wait, too; what ranks wait is in their sums
            return 0.0, 0.0
        return self.transport.waited.to_receive_s, self.transport.waited.to_send_s


class DeviceWindow(NamedTuple):
    """A window of which a device's own clock is known, before each call and after the last."""

    calls: Sequence[Bound]
    marks: Marks
    num_steps: int


class _CallPlaces(NamedTuple):
    """The keys of a program's calls, for each call the place of its key, and where sums stand."""

    keys: list[Key]
    places: NDArray[np.int64]
    meetings: dict[Key, NDArray[np.int64]]


def _key(bound: Bound) -> Key:
    match bound.lane:
        case "compute":
            return bound.kind, ()
        case "collective" if len(bound.ranks) > 1:
            return bound.lane, bound.ranks
        case "collective":  # a rank clips its own gradients
            return "update", ()
        case _:
            return bound.lane, ()


def _messages(calls: Sequence[Bound], marks: Marks) -> tuple[tuple[Sent, ...], tuple[Taken, ...]]:
    """Return when the messages of a window were sent and taken."""
    sent: list[Sent] = []
    taken: list[Taken] = []
    for bound, start_s, end_s in zip(calls, marks, marks[1:], strict=False):
        if bound.lane == "send":
            sent.append(Sent(bound.edge, bound.ranks[0], bound.micro_batch, start_s, end_s))
        elif bound.lane == "take":
            taken.append(Taken(bound.edge, bound.ranks[0], bound.micro_batch, start_s, end_s))
    return tuple(sent), tuple(taken)
