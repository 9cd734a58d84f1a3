"""Regions: hosts that reach each other fast and all others slowly, found from message times.

    capability of two hosts   a + b / m        seconds a byte of messages of m bytes: b is what a
                                               minimal payload takes, a what each byte more does
    capability of a host      sum of w t       seconds of benchmark tasks t, by their weights w

Hosts are joined two by two, the nearest first, then groups of them, by the mean of the logarithms
between their members.  Where joining takes a leap, regions end: all that was joined before it is
inside one, what would be joined after it is not.  Without a leap there is one region.  Hosts of a
region are told apart in the same way by what they compute.

Source:   SpanTrain, arXiv:2505.15536 (two payloads, benchmark tasks, two levels of clusters).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import combinations, pairwise, permutations
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster
from penstock.errors import ClusterError

Floats: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = tuple[tuple[int, ...], ...]

MESSAGE_BYTES = 2**19  # of messages that hosts are compared by, where nothing is known of them
LEAP = 3.0  # between regions a byte takes so many times as long as inside, or they are one
_LEAST_S = 1e-18  # a byte: of a link that takes no time
UNLIKE = 1.3  # hosts whose benchmark tasks take so many times as long are of another kind


def seconds_per_byte(a_s: float, b_s: float, size_bytes: int = MESSAGE_BYTES) -> float:
    """Return the capability a + b / m of two hosts: less is better.

    a_s:      for each byte.  b_s: for a minimal payload.  size_bytes: m.
    """
    return a_s + b_s / size_bytes


def regions(capability: Floats, leap: float = LEAP) -> Groups:
    """Return the regions of hosts, each increasing, in the order of their first hosts.

    capability:  seconds a byte between any two; of the two ways the slower one counts.
    """
    count = len(capability)
    slower = np.maximum(capability, capability.T)
    apart = {pair: math.log(float(slower[pair])) for pair in combinations(range(count), 2)}
    merges = _merges(count, apart)
    leaps = [(b.height - a.height, -at) for at, (a, b) in enumerate(pairwise(merges), 1)]
    if not leaps or max(leaps)[0] < math.log(leap):
        return (tuple(range(count)),)
    return _after(count, merges[: -max(leaps)[1]])


def alike(seconds: Sequence[float], unlike: float = UNLIKE) -> Groups:
    """Return the hosts that compute alike: neighbours in order of their seconds are near."""
    order = sorted(range(len(seconds)), key=lambda at: (seconds[at], at))
    groups = [[order[0]]]
    for before, at in pairwise(order):
        if seconds[at] > unlike * seconds[before]:
            groups.append([])
        groups[-1].append(at)
    return tuple(sorted(tuple(sorted(group)) for group in groups))


class _Merge(NamedTuple):
    """Two groups that become one, by number, at a height; new groups are numbered on."""

    first: int
    second: int
    height: float


def _merges(count: int, apart: Mapping[tuple[int, int], float]) -> list[_Merge]:
    """Return the merges of groups, the nearest first, by mean distance (UPGMA)."""
    least = min(apart.values(), default=0.0)
    between = np.full((count, count), np.inf)
    for (a, b), distance in apart.items():
        between[a, b] = between[b, a] = distance - least
    numbers, sizes, found = list(range(count)), np.ones(count), list[_Merge]()
    for number in range(count, 2 * count - 1):
        a, b = sorted(divmod(int(np.argmin(between)), count))
        first, second = sorted((numbers[a], numbers[b]))
        found.append(_Merge(first, second, float(between[a, b])))
        mean = (sizes[a] * between[a] + sizes[b] * between[b]) / (sizes[a] + sizes[b])
        between[a], between[:, a] = mean, mean
        between[a, a], between[b], between[:, b] = np.inf, np.inf, np.inf
        numbers[a], sizes[a] = number, sizes[a] + sizes[b]
    return found


def _after(count: int, merges: Sequence[_Merge]) -> Groups:
    groups: dict[int, tuple[int, ...]] = {at: (at,) for at in range(count)}
    for number, merge in enumerate(merges, count):
        groups[number] = tuple(sorted(groups.pop(merge.first) + groups.pop(merge.second)))
    return tuple(sorted(groups.values()))


def capability_of(cluster: Cluster, size_bytes: int = MESSAGE_BYTES) -> Floats:
    """Return the seconds a byte between the hosts of a cluster, by its links; 1.0 without one."""
    firsts = [cluster.ranks_on(host)[0] for host in cluster.hosts]
    found = np.ones((len(firsts), len(firsts)))
    for a, b in permutations(range(len(firsts)), 2):
        with suppress(ClusterError):  # they do not reach each other
            link = cluster.link(firsts[a], firsts[b])
            each_s = seconds_per_byte(1 / link.bytes_per_s, link.latency_s, size_bytes)
            found[a, b] = max(each_s, _LEAST_S)
    return found


def regions_of(cluster: Cluster, size_bytes: int = MESSAGE_BYTES) -> Groups:
    """Return the regions of a cluster's hosts, by their numbers, as its links tell them."""
    return regions(capability_of(cluster, size_bytes))
