"""Device orders: lines of devices in which neighbours have fast links."""

import itertools
from collections.abc import Iterator

import numpy as np

from bench.planners.problem import Problem
from penstock.cluster.order import min_cut_order, slower_way
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


def _links(problem: Problem) -> Floats:
    """Return bytes per second, the slower direction of each link; none to itself."""
    return slower_way(np.array(problem.bytes_per_s, np.float64))
