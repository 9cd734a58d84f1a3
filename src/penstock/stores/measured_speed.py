"""Measured speed: the latency and the bandwidth of what a dataset is fetched from, tried now.

The latency is that of a request for one byte, the median of a few.  Then some MB are fetched
twice, as many requests at a time as the dataset makes.  On the link one of n parts takes

    min((whole - latency) / n, whole / turns - latency),  turns = ceil(n / requests)

seconds: the first where the link is full, the second where requests wait for answers.  What a cache
holds is as fast as its disk.
"""

import time
from collections.abc import Callable
from statistics import median

from penstock.stores.predicted import StoreSpeed
from penstock.stores.stored import Stored
from penstock.units import MiB

_TRIES = 3
_BURSTS = 2  # the first one connects
_ENOUGH_BYTES = 4 * MiB


def measured_speed(dataset: Stored, clock: Callable[[], float] = time.perf_counter) -> StoreSpeed:
    """Return how fast a store answers.

    Raises:   StoreError: it does not.
    """
    first = dataset.parts(0)[0]
    least_s: list[float] = []
    for _ in range(1 + _TRIES):  # the first one connects
        begun_s = clock()
        dataset.fetched(first._replace(size_bytes=min(1, first.size_bytes)))
        least_s.append(clock() - begun_s)
    latency_s = median(least_s[1:])
    chosen, size = list[int](), 0
    while size < _ENOUGH_BYTES and len(chosen) < len(dataset):
        size += dataset.objects[len(chosen)].size_bytes
        chosen.append(len(chosen))
    whole_s = min(_seconds_of(dataset, chosen, clock) for _ in range(_BURSTS))
    parts = sum(len(dataset.parts(index)) for index in chosen)
    turns = -(-parts // dataset.fetching.requests)
    each_s = min((whole_s - latency_s) / parts, whole_s / turns - latency_s)
    return StoreSpeed(latency_s, size / parts / each_s if each_s > 0 else float("inf"))


def _seconds_of(dataset: Stored, chosen: list[int], clock: Callable[[], float]) -> float:
    begun_s = clock()
    with dataset.following(iter(chosen)):
        for index in chosen:
            dataset.content(index)
    return clock() - begun_s
