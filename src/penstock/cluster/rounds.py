"""Rounds: the seconds of messages sent at once, and of all rounds of a collective.

A message takes latency_s + bytes / bytes_per_s of its link, where `bytes` are all that its busiest
end has to pass in the same round.  Inside a host each rank is an end of its own; between hosts and
across regions the network card of the host is one end for all its ranks.  Both directions are
separate.  A round is over when its last message has arrived; then the next one begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ClusterError
from penstock.units import GB, format_seconds

if TYPE_CHECKING:
    from penstock.cluster.cluster import Cluster, Link

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

INSIDE, BETWEEN, ACROSS = 0, 1, 2


class Rounds(NamedTuple):
    """A number of successive rounds, as slow as their busiest messages on links of one level.

    share  of the collective's bytes, which the busiest end passes in a round
    """

    times: int
    latency_s: float
    share: float
    bytes_per_s: float

    def seconds(self, size_bytes: float) -> float:
        """Return times * (latency_s + share * size_bytes / bytes_per_s)."""
        return self.times * (self.latency_s + size_bytes * self.share / self.bytes_per_s)

    def __str__(self) -> str:
        """Return "7 x (5.00 us + 0.125 of the bytes at 300 GB/s)"."""
        rate = f"{self.share:.4g} of the bytes at {self.bytes_per_s / GB:.4g} GB/s"
        return f"{self.times} x ({format_seconds(self.latency_s)} + {rate})"


Phase: TypeAlias = tuple[Rounds, ...]  # side by side: it takes as long as the slowest


@dataclass(frozen=True, slots=True)
class CollectivePhases:
    """How a collective proceeds: its phases, one after the other.

    steady  what every further chunk takes, where the bytes may be cut into chunks that follow each
            other through the phases; else nothing
    """

    phases: tuple[Phase, ...]
    steady: Phase = ()

    def seconds(self, size_bytes: float) -> float:
        """Return the sum of the phases, or the least over 1, 2, 4, ... chunks of a byte or more.

        With k chunks: the phases with a chunk each, and k - 1 times what is steady.
        """
        if not self.steady:
            return self._once(size_bytes)
        counts = (2**power for power in range(max(1, int(size_bytes)).bit_length()))
        return min(
            self._once(size_bytes / k) + (k - 1) * _slowest(self.steady, size_bytes / k)
            for k in counts
        )

    def _once(self, size_bytes: float) -> float:
        return sum((_slowest(phase, size_bytes) for phase in self.phases), 0.0)

    def __str__(self) -> str:
        """Return a line for each phase, and one for the time of each further chunk."""
        lines = [" | ".join(map(str, phase)) for phase in self.phases]
        if self.steady:
            lines.append(f"each further chunk: {' | '.join(map(str, self.steady))}")
        return "\n".join(lines)


def _slowest(phase: Phase, size_bytes: float) -> float:
    return max(rounds.seconds(size_bytes) for rounds in phase)


class Messages(NamedTuple):
    """Messages sent at once: positions in the group, and shares of the collective's bytes."""

    source: Ints
    target: Ints
    share: Floats

    def back(self) -> Messages:
        """Return the same messages reversed."""
        return Messages(self.target, self.source, self.share)


def sent(source: Ints, target: Ints, share: float | Floats) -> Messages:
    """Return messages that share one share, or have one each."""
    return Messages(source, target, np.broadcast_to(np.asarray(share, np.float64), source.shape))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The ranks of a collective, and by position the numbers of their hosts and regions."""

    cluster: Cluster
    ranks: tuple[int, ...]
    host: Ints
    region: Ints

    def __len__(self) -> int:
        return len(self.ranks)

    def link(self, level: int) -> Link:
        """Return the link of a level between some of the ranks; of pairs of hosts, the worst.

        Raises:   ClusterError: the cluster has none.
        """
        if self.cluster.pairs and level != INSIDE:
            return self._worst(level)
        found = (self.cluster.inside, self.cluster.between, self.cluster.across)[level]
        if found is not None:
            return found
        pairs = combinations(range(len(self)), 2)
        a, b = next(pair for pair in pairs if self.level(*pair) == level)
        return self.cluster.link(self.ranks[a], self.ranks[b])  # raises

    def _worst(self, level: int) -> Link:
        """Return a link that is nowhere better than any of this level, one way or the other."""
        firsts = [self.ranks[int(at)] for at in np.unique(self.host, return_index=True)[1]]
        place = {rank: self.ranks.index(rank) for rank in firsts}
        pairs = [
            (a, b) for a, b in permutations(firsts, 2) if self.level(place[a], place[b]) == level
        ]
        links = [self.cluster.link(*pair) for pair in pairs]
        return replace(
            links[0],
            latency_s=max(each.latency_s for each in links),
            bytes_per_s=min(each.bytes_per_s for each in links),
            overhead_s=max(each.overhead_s for each in links),
            copy_bytes_per_s=min(each.copy_bytes_per_s for each in links),
            slowdown=max(each.slowdown for each in links),
            core_s=max(each.core_s for each in links),
            core_bytes_per_s=min(each.core_bytes_per_s for each in links),
        )

    def level(self, a: int, b: int) -> int:
        """Return the level of the link between two positions."""
        if self.host[a] == self.host[b]:
            return INSIDE
        return BETWEEN if self.region[a] == self.region[b] else ACROSS


def group_of(cluster: Cluster, ranks: Sequence[int]) -> Group:
    """Return where `ranks` stand.

    Raises:   ClusterError: no such rank, or one that is listed twice.
    """
    ranks = tuple(ranks)
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise ClusterError(f"rank {twice} stands {ranks.count(twice)} times in {ranks}")
    hosts = [cluster.host_number(rank) for rank in ranks]
    names: dict[str, int] = {}
    regions = [names.setdefault(cluster.hosts[host].region, len(names)) for host in hosts]
    return Group(cluster, ranks, np.array(hosts, np.int64), np.array(regions, np.int64))


def at_once(group: Group, messages: Messages, times: int = 1) -> Phase:
    """Return the phase of `times` rounds that send `messages`, by the levels of their links.

    Raises:   ClusterError: a level without a link.
    """
    hosts = group.host[messages.source], group.host[messages.target]
    regions = group.region[messages.source], group.region[messages.target]
    levels = np.where(regions[0] == regions[1], BETWEEN, ACROSS)
    levels[hosts[0] == hosts[1]] = INSIDE
    found: list[Rounds] = []
    for level in np.unique(levels).tolist():
        link = group.link(level)
        ends = (messages.source, messages.target) if level == INSIDE else hosts
        own = _passed(ends, np.where(levels == level, messages.share, 0.0))
        share, bytes_per_s = float(own[levels == level].max()), link.bytes_per_s
        if level != INSIDE and (levels == ACROSS + BETWEEN - level).any():
            slow = group.link(ACROSS + BETWEEN - level)  # on the same cards
            rates = np.where(levels == level, link.bytes_per_s, slow.bytes_per_s)
            seconds = _passed(ends, np.where(levels == INSIDE, 0.0, messages.share / rates))
            busiest = float(seconds[levels == level].max())
            share, bytes_per_s = (1.0, 1.0 / busiest) if busiest else (share, np.inf)
        found.append(Rounds(times, link.latency_s, share, float(bytes_per_s)))
    return tuple(found)


def _passed(ends: tuple[Ints, Ints], amounts: Floats) -> Floats:
    """Return for each message the amount that the busier of its two ends passes."""
    leave, reach = (np.bincount(end, amounts)[end] for end in ends)
    return np.maximum(leave, reach)
