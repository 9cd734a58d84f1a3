"""Moved links: a cluster whose links take what they were found to take in the midst of a run."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.cluster.cluster import Cluster, HostPair, Link
from penstock.program.codes import SEND
from penstock.program.program import Program

if TYPE_CHECKING:
    from penstock.gauge.hosts import Compared

_MOVED = 1.5  # a payload takes so many times as long as the link says, or less: it has moved


class Relinked(NamedTuple):
    """A cluster as it is now.

    moved:    of each pair of hosts whose link is another one, how many times as long a large
              payload takes.
    """

    cluster: Cluster
    moved: tuple[tuple[str, str, float], ...]


def relinked(cluster: Cluster, compared: "Sequence[Compared]") -> Relinked:
    """Return `cluster` with a link of its own for each pair of hosts that has moved.

    What each end computes for a message stays; the rest of what payloads take is the link's.
    """
    pairs = {(pair.source, pair.target): pair for pair in cluster.pairs}
    moved: list[tuple[str, str, float]] = []
    for each in compared:
        a, b = (cluster.hosts[host] for host in each.hosts)
        link = cluster.link(cluster.ranks_on(a)[0], cluster.ranks_on(b)[0])
        times = [now / before for now, before in _payloads(link, each)]
        if max(times) < _MOVED and min(times) > 1 / _MOVED:
            continue
        now = _link_now(link, each)
        moved.append((a.name, b.name, times[-1]))
        pairs.pop((b.name, a.name), None)
        pairs[a.name, b.name] = HostPair(
            a.name,
            b.name,
            now.latency_s,
            now.bytes_per_s,
            now.overhead_s,
            now.copy_bytes_per_s,
            now.slowdown,
        )
    return Relinked(replace(cluster, pairs=tuple(pairs.values())), tuple(moved))


def _payloads(link: Link, each: "Compared") -> list[tuple[float, float]]:
    """Return what the minimal and the large payload take, as found, and by `link`."""
    found = each.small_s, each.large_s
    said = (link.latency_s + size / link.bytes_per_s + 2 * link.end_s(size) for size in each.sizes)
    return list(zip(found, (max(seconds, 1e-9) for seconds in said), strict=True))


def _link_now(link: Link, each: "Compared") -> Link:
    from penstock.gauge.links import Timing, fit

    found = zip(each.sizes, (each.small_s, each.large_s), strict=True)
    now = fit([Timing(size, s, s, s, link.end_s(size)) for size, s in found])
    own = link.overhead_s, link.copy_bytes_per_s, link.slowdown
    return Link(now.latency_s, now.bytes_per_s, *own)


def pairs_used(program: Program) -> set[tuple[int, int]]:
    """Return the ranks that send to each other, or are next to each other in a sum."""
    code = program.code
    ranks = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    rows = np.flatnonzero(code.op == SEND)
    sends = zip(ranks[rows].tolist(), code.peer[rows].tolist(), strict=True)
    rings = (pairwise((*each.ranks, each.ranks[0])) for each in code.reductions)
    both = {*sends, *(pair for ring in rings for pair in ring)}
    return {(min(pair), max(pair)) for pair in both if pair[0] != pair[1]}
