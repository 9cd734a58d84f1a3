"""Device orders: lines of devices in which neighbours have fast links.

The links are cut in two where the fewest bytes per second cross, then each part again, and so on:
slow links end up between parts and are crossed once.

Source:   001#4 SPP, arXiv:2204.10562 (recursive min-cut).
          M. Stoer, F. Wagner, "A simple min-cut algorithm", 1997.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from bench.planners.problem import Problem
from penstock.search.transformer.partition_kernel import Floats

Order = tuple[int, ...]
_MOST_TRIED = 5  # devices of which all orders are tried


def listed(problem: Problem) -> Iterator[Order]:
    """Yield the order in which the devices are given, host by host."""
    yield tuple(sorted(range(problem.num_devices), key=lambda device: problem.hosts[device]))


def scattered(problem: Problem) -> Iterator[Order]:
    """Yield the first device of each host, then the second of each, and so on."""
    (order,) = listed(problem)
    place: dict[int, int] = {}
    seen: dict[int, int] = {}
    for device in order:
        host = problem.hosts[device]
        place[device] = seen[host] = seen.get(host, -1) + 1
    yield tuple(sorted(order, key=lambda device: place[device]))


def by_min_cut(problem: Problem) -> Iterator[Order]:
    """Yield the order of a recursive min-cut, the part with the first device first."""
    yield min_cut_order(_links(problem), range(problem.num_devices))


def many(problem: Problem) -> Iterator[Order]:
    """Yield all orders of few devices; else those above, by kinds, and each from its other end.

    Of orders in which the same kinds have the same links one is enough.
    """
    count, kind_of = problem.num_devices, problem.kind_of
    seen: set[bytes] = set()
    links = _links(problem)
    for order in _all(problem) if count <= _MOST_TRIED else _some(problem):
        kinds = bytes(kind_of[device] for device in order)
        what = kinds + links[np.ix_(order, order)].tobytes()
        if what not in seen:
            seen.add(what)
            yield order


def _all(problem: Problem) -> Iterator[Order]:
    return itertools.permutations(range(problem.num_devices))


def _some(problem: Problem) -> Iterator[Order]:
    kinds, kind_of = range(len(problem.kinds)), problem.kind_of
    speed = sorted(kinds, key=lambda kind: sum(problem.kinds[kind].layer_s))
    ways = [tuple(speed), tuple(reversed(speed))]
    if len(kinds) <= 3:
        ways = list(itertools.permutations(speed))
    for one in (listed, by_min_cut, scattered):
        for order in one(problem):
            yield order
            yield order[::-1]
            for way in ways:
                yield tuple(device for kind in way for device in order if kind_of[device] == kind)


def min_cut_order(links: Floats, devices: Sequence[int]) -> Order:
    """Return `devices` in the order of recursive min-cuts; links[a, b] are bytes per second."""
    if len(devices) < 2:
        return tuple(devices)
    part = min_cut(links[np.ix_(devices, devices)])
    first = [devices[at] for at in part]
    others = [device for device in devices if device not in first]
    if devices[0] in others:
        first, others = others, first
    return min_cut_order(links, first) + min_cut_order(links, others)


def min_cut(links: Floats) -> list[int]:
    """Return one side, increasing, of the cut over which least goes; links[a, b] both ways.

    Stoer and Wagner: of two or more devices, in O(n^3).  The first found of equals.
    """
    weights = np.array(links, np.float64)
    np.fill_diagonal(weights, 0.0)
    merged = [[at] for at in range(len(weights))]
    left = list(range(len(weights)))
    best, side = np.inf, [0]
    while len(left) > 1:
        before, last, cut = _last_two(weights, left)
        if cut < best:
            best, side = cut, merged[last]
        merged[before] = merged[before] + merged[last]
        weights[before] += weights[last]
        weights[:, before] += weights[:, last]
        left.remove(last)
    return sorted(side)


def _last_two(weights: Floats, left: Sequence[int]) -> tuple[int, int, float]:
    """Return the last two when the most strongly tied joins next, and what ties the last."""
    waiting = list(left)
    before = last = waiting.pop(0)
    tie = weights[last].copy()
    cut = 0.0
    while waiting:
        before, last = last, max(waiting, key=lambda at: tie[at])
        waiting.remove(last)
        cut = float(tie[last])
        tie += weights[last]
    return before, last, cut


def _links(problem: Problem) -> Floats:
    """Return bytes per second, the slower direction of each link; none to itself."""
    links = np.array(problem.bytes_per_s, np.float64)
    links = np.minimum(links, links.T)
    np.fill_diagonal(links, 0.0)
    return np.minimum(links, np.finfo(np.float64).max / (len(links) + 1) ** 2)  # sums are numbers
