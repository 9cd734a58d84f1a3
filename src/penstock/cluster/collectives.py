"""Collectives: the seconds of sums, gathers and exchanges over ranks, by algorithm.

An algorithm is rounds of messages; rounds.py says what a round takes, and docs/cluster.md
has the resulting formulas for symmetric ranks.

    all_reduce      S bytes on each rank, the sum on all
    reduce_scatter  S bytes on each rank, the sum of one n-th on each
    all_gather      one n-th of S on each rank, all of it on all
    broadcast       S bytes on the first rank, then on all
    all_to_all      S bytes on each rank, one n-th of it for each

Ignores:  other traffic on the links, and concurrent collectives; the time of additions; what
          each end computes (`Link.end_s`); that ranks that have what they need begin a round early.
Source:   ring: "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
          halving, doubling, and a broadcast by both: "Optimization of collective communication
          operations in MPICH", 2005; doubling of an all-to-all: "Efficient algorithms for
          all-to-all communications in multiport message-passing systems", 1997.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.cluster.nested import (
    all_pairs,
    double_tree,
    exchange_by_host,
    level_by_level,
    spread_by_level,
)
from penstock.cluster.patterns import (
    backwards,
    binomial,
    core_size,
    doublings,
    folded,
    halves,
    shifted,
    whole_vectors,
)
from penstock.cluster.rounds import (
    CollectivePhases,
    Group,
    Messages,
    Phase,
    at_once,
    group_of,
    sent,
)

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster

Collective: TypeAlias = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"
]
Algorithm: TypeAlias = Literal["ring", "tree", "doubling", "halving", "direct", "hierarchical"]

ALGORITHMS: Mapping[Collective, tuple[Algorithm, ...]] = MappingProxyType(
    {
        "all_reduce": ("ring", "tree", "doubling", "halving", "direct", "hierarchical"),
        "reduce_scatter": ("ring", "halving", "direct", "hierarchical"),
        "all_gather": ("ring", "halving", "direct", "hierarchical"),
        "broadcast": ("ring", "doubling", "halving", "hierarchical"),
        "all_to_all": ("ring", "doubling", "direct", "hierarchical"),
    }
)

# What gloo and NCCL choose from by themselves: gloo/allreduce.cc is a ring, NCCL's graph/tuning.cc
# times a ring and a tree.
USUAL: Mapping[Collective, tuple[Algorithm, ...]] = MappingProxyType(
    {
        "all_reduce": ("ring", "tree"),
        "reduce_scatter": ("ring",),
        "all_gather": ("ring",),
        "broadcast": ("ring", "doubling"),
        "all_to_all": ("direct",),
    }
)

_EQUAL = 1 + 1e-9  # what differs by less takes equally long: sums in another order


class Fastest(NamedTuple):
    """The fastest algorithm, and its seconds."""

    algorithm: Algorithm
    seconds: float


def best(
    cluster: Cluster,
    what: Collective,
    size_bytes: float,
    *,
    ranks: Sequence[int],
    among: Sequence[Algorithm] | None = None,
) -> Fastest:
    """Return the fastest of the algorithms `among`, the first of those that take equally long.

    None: all that there are for `what`.
    Raises:   as `way_of`.
    """
    return _fastest(_ways(cluster, what, ranks, among), size_bytes)


def _ways(
    cluster: Cluster,
    what: Collective,
    ranks: Sequence[int],
    among: Sequence[Algorithm] | None,
) -> list[tuple[Algorithm, CollectivePhases]]:
    names = ALGORITHMS[what] if among is None else among
    return [(name, way_of(cluster, what, name, ranks)) for name in names]


def _fastest(ways: Iterable[tuple[Algorithm, CollectivePhases]], size_bytes: float) -> Fastest:
    timed = [Fastest(name, way.seconds(size_bytes)) for name, way in ways]
    least = min(seconds for _, seconds in timed)
    return next(each for each in timed if each.seconds <= least * _EQUAL)


def way_of(
    cluster: Cluster, what: Collective, algorithm: Algorithm, ranks: Sequence[int]
) -> CollectivePhases:
    """Return the rounds of a collective over `ranks`, in their order.

    `way_of(...).seconds(size_bytes)` are its seconds, 0.0 for one rank.  "hierarchical" and "tree"
    take the ranks of a host, and the hosts of a region, together, whatever the order.
    Raises:   ValueError: there is no such algorithm for it.
              ClusterError: no such rank, one that is listed twice, or no link where a message
              goes.
    """
    if algorithm not in ALGORITHMS[what]:
        known = ", ".join(ALGORITHMS[what])
        raise ValueError(f"{what} has no algorithm {algorithm!r}; it has {known}")
    return _way_of(cluster, what, algorithm, tuple(ranks))


@lru_cache(maxsize=4096)  # a simulation asks for the same ones again and again
def _way_of(
    cluster: Cluster, what: Collective, algorithm: Algorithm, ranks: tuple[int, ...]
) -> CollectivePhases:
    group = group_of(cluster, ranks)
    if len(group) < 2:
        return CollectivePhases(())
    match what:
        case "all_reduce":
            return _all_reduce(group, algorithm)
        case "reduce_scatter":
            return CollectivePhases(_all_gather(group, algorithm)[::-1])
        case "all_gather":
            return CollectivePhases(_all_gather(group, algorithm))
        case "broadcast":
            return _broadcast(group, algorithm)
        case "all_to_all":
            return CollectivePhases(_all_to_all(group, algorithm))


def _all_reduce(group: Group, algorithm: Algorithm) -> CollectivePhases:
    n = len(group)
    match algorithm:
        case "ring":
            return CollectivePhases((at_once(group, shifted(n, 1, 1 / n), 2 * (n - 1)),))
        case "tree":
            return double_tree(group)
        case "doubling":
            return _way(group, whole_vectors(n))
        case "halving":
            scatter = [*folded(n), *halves(n, np.full(core_size(n), 1 / core_size(n)))]
            return _way(group, [*scatter, *backwards(scatter)])
        case "direct":
            return CollectivePhases((all_pairs(group), all_pairs(group)))
        case "hierarchical":
            gather = level_by_level(group, even=True)
            return CollectivePhases((*gather[::-1], *gather))


def _all_gather(group: Group, algorithm: Algorithm) -> tuple[Phase, ...]:
    """Return the phases of an all-gather; a reduce-scatter is its messages reversed.

    Each message then goes back, the last one first, and is added where it comes from.
    """
    n = len(group)
    match algorithm:
        case "ring":
            return (at_once(group, shifted(n, 1, 1 / n), n - 1),)
        case "halving":
            extra = n - core_size(n)
            weights = np.repeat([2 / n, 1 / n], [extra, core_size(n) - extra])
            scatter = [*folded(n), *halves(n, weights), *folded(n, back=True, share=1 / n)]
            return _way(group, backwards(scatter)).phases
        case "direct":
            return (all_pairs(group),)
        case "hierarchical":
            return level_by_level(group, even=False)
        case "tree" | "doubling":
            raise AssertionError(algorithm)


def _broadcast(group: Group, algorithm: Algorithm) -> CollectivePhases:
    n = len(group)
    match algorithm:
        case "ring":
            chain = sent(np.arange(n - 1), np.arange(1, n), 1.0)
            return CollectivePhases((at_once(group, chain, n - 1),), at_once(group, chain))
        case "doubling":
            return _way(group, [sent(a, b, 1.0) for a, b, _ in binomial(n)])
        case "halving":
            scatter = [sent(a, b, blocks / n) for a, b, blocks in binomial(n)]
            return CollectivePhases((*_way(group, scatter).phases, *_all_gather(group, "halving")))
        case "hierarchical":
            return CollectivePhases(spread_by_level(group))
        case "tree" | "direct":
            raise AssertionError(algorithm)


def _all_to_all(group: Group, algorithm: Algorithm) -> tuple[Phase, ...]:
    n = len(group)
    match algorithm:
        case "ring":
            return _way(group, [shifted(n, by, 1 / n) for by in range(1, n)]).phases
        case "doubling":
            steps = [2**power for power in range(doublings(n))]
            held = np.arange(n)
            blocks = [np.count_nonzero(held & step) for step in steps]
            pairs = zip(steps, blocks, strict=True)
            return _way(group, [shifted(n, step, count / n) for step, count in pairs]).phases
        case "direct":
            return (all_pairs(group),)
        case "hierarchical":
            return exchange_by_host(group)
        case "tree" | "halving":
            raise AssertionError(algorithm)


def _way(group: Group, rounds: Sequence[Messages]) -> CollectivePhases:
    return CollectivePhases(tuple(at_once(group, messages) for messages in rounds))
