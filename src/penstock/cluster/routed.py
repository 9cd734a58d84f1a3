"""Routed: the seconds of a sum along the rounds of a topology (penstock/routes.py).

    pieces * sum over rounds of (latency_s + bytes of the busiest end / bytes_per_s)
    + pieces * messages that the busiest rank sends and takes * overhead_s

Ignores:  as collectives.py; and that a rank begins a round once it has what it needs for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cluster.rounds import CollectivePhases, Messages, at_once, group_of, sent
from penstock.routes import PIECE_BYTES, HopRound, routes_of

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster


class Routed(NamedTuple):
    """The phases of a sum, and the messages that its busiest rank sends and takes."""

    phases: CollectivePhases
    messages: int


def routed_s(cluster: Cluster, topology: str, size_bytes: float, ranks: Sequence[int]) -> float:
    """Return the seconds of a sum over `ranks`, whose places are their order; 0.0 for one rank.

    Raises:   ValueError: there is no such topology.
              ClusterError: no such rank, one that is listed twice, or no link where a hop goes.
    """
    if len(ranks) < 2:
        return 0.0
    phases, messages = _routed(cluster, topology, tuple(ranks))
    pieces = max(1, -(-int(size_bytes) // PIECE_BYTES))
    busy_s = messages * cluster.slowest_link(ranks).overhead_s
    return pieces * (phases.seconds(size_bytes / pieces) + busy_s)


@lru_cache(maxsize=4096)
def _routed(cluster: Cluster, topology: str, ranks: tuple[int, ...]) -> Routed:
    group, routes = group_of(cluster, ranks), routes_of(topology, len(ranks))
    messages = np.zeros(len(ranks), np.int64)
    phases = [at_once(group, _messages(each, routes.blocks)) for each in routes.rounds]
    for each in routes.rounds:
        pairs = np.array(sorted({(hop.source, hop.target) for hop in each.hops}))
        messages += np.bincount(pairs.ravel(), minlength=len(ranks))
    return Routed(CollectivePhases(tuple(phases)), int(messages.max()))


def _messages(each: HopRound, blocks: int) -> Messages:
    rows = np.array(each.hops, np.int64)
    return sent(rows[:, 0], rows[:, 1], (rows[:, 3] - rows[:, 2]) / blocks)
