"""Predicted: how long a reader waits for a store.

A request takes the store's latency, then its bytes come over a link that all requests share, in the
order in which they were made.  What is asked for when is as in `Fetcher`: at most so many requests
at a time, so many bytes ahead.  In the long run a step waits

    max(0, parts * each - computes, (parts - held) * each)
    each = max(part / bytes_per_s, (latency_s + part / bytes_per_s) / min(requests, held))

seconds, where `held` parts fit into the bytes that may be ahead.

Ignores:  what the processor has to do for a request; a link that others use too.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple


class StoreSpeed(NamedTuple):
    """Seconds until an answer begins, and bytes per second of all answers together."""

    latency_s: float
    bytes_per_s: float


class Reach(NamedTuple):
    """How far a reader looks ahead.

    requests:    at a time.
    most_bytes:  on their way, or waiting to be taken; always one part.
    """

    requests: int
    most_bytes: int


ONE_BY_ONE = Reach(1, 0)  # nothing is asked for before it is needed


def waits_s(
    steps: Sequence[Sequence[int]], compute_s: float, speed: StoreSpeed, reach: Reach
) -> list[float]:
    """Return the seconds that each step waits, where steps compute as long.

    steps:  of each, the bytes of its parts, in the order in which they are taken.
    """
    sizes = [size for step in steps for size in step]
    if reach == ONE_BY_ONE:
        each = [[speed.latency_s + size / speed.bytes_per_s for size in step] for step in steps]
        return [sum(step) for step in each]
    came = _OnLink(sizes, speed, reach)
    clock_s, at, found = 0.0, 0, list[float]()
    came.ask(0, clock_s)
    for step in steps:
        begun_s = clock_s
        for _ in step:
            clock_s = max(clock_s, came.at_s[at])
            at += 1
            came.ask(at, clock_s)
        found.append(clock_s - begun_s)
        clock_s += compute_s
    return found


def long_run_s(
    parts: int, size_bytes: int, compute_s: float, speed: StoreSpeed, reach: Reach
) -> float:
    """Return the seconds that a step waits in the long run, for parts of one size."""
    if reach == ONE_BY_ONE:
        return parts * (speed.latency_s + size_bytes / speed.bytes_per_s)
    held = max(1, -(-int(reach.most_bytes) // size_bytes))
    request_s = speed.latency_s + size_bytes / speed.bytes_per_s
    each_s = max(size_bytes / speed.bytes_per_s, request_s / min(reach.requests, held))
    return max(0.0, parts * each_s - compute_s, (parts - held) * each_s)


class _OnLink:
    """When each part comes, once it is known when it was asked for."""

    def __init__(self, sizes: Sequence[int], speed: StoreSpeed, reach: Reach) -> None:
        self.at_s: list[float] = []
        self._sizes, self._speed, self._reach = sizes, speed, reach
        self._free_s = [0.0] * reach.requests
        self._link_s, self._held = 0.0, 0

    def ask(self, taken: int, now_s: float) -> None:
        """Ask for what may be on its way once so many parts are taken."""
        if taken:
            self._held -= self._sizes[taken - 1]
        while len(self.at_s) < len(self._sizes):
            ahead = len(self.at_s) - taken
            is_full = ahead > 0 and self._held >= self._reach.most_bytes
            if is_full or ahead >= self._reach.requests + taken:
                return
            size = self._sizes[len(self.at_s)]
            begun_s = max(now_s, heapq.heappop(self._free_s)) + self._speed.latency_s
            self._link_s = max(begun_s, self._link_s) + size / self._speed.bytes_per_s
            heapq.heappush(self._free_s, self._link_s)
            self.at_s.append(self._link_s)
            self._held += size
