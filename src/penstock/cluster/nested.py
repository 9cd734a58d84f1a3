"""Nested: algorithms that take the ranks of a host, and the hosts of a region, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.cluster.patterns import doublings
from penstock.cluster.rounds import (
    ACROSS,
    BETWEEN,
    INSIDE,
    CollectivePhases,
    Group,
    Ints,
    Messages,
    Phase,
    Rounds,
    at_once,
    sent,
)


class HostGroups(NamedTuple):
    """The ranks of a group by host.

    members  positions on each host
    regions  numbers of the hosts, in `members`, of each region
    """

    members: tuple[Ints, ...]
    regions: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, group: Group) -> HostGroups:
        positions: dict[int, list[int]] = {}
        for position, host in enumerate(group.host.tolist()):
            positions.setdefault(host, []).append(position)
        members = tuple(np.array(them, np.int64) for them in positions.values())
        regions: dict[int, list[int]] = {}
        for host, them in enumerate(members):
            regions.setdefault(int(group.region[them[0]]), []).append(host)
        return cls(members, tuple(map(tuple, regions.values())))


def all_pairs(group: Group) -> Phase:
    """Return the round in which every rank sends one n-th to every other one.

    Of it only what each end passes counts; so one message stands for all between two hosts.
    """
    n, counts = len(group), HostGroups.of(group)
    parts: list[Messages] = []
    for ranks in counts.members:
        if len(ranks) > 1:
            parts.append(sent(ranks, np.roll(ranks, 1), (len(ranks) - 1) / n))
    first = np.array([ranks[0] for ranks in counts.members])
    sizes = np.array([len(ranks) for ranks in counts.members])
    a, b = np.nonzero(~np.eye(len(first), dtype=np.bool_))
    parts.append(sent(first[a], first[b], sizes[a] * sizes[b] / n))
    return at_once(group, _together(parts))


def _together(parts: Sequence[Messages]) -> Messages:
    return Messages(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def double_tree(group: Group) -> CollectivePhases:
    """Return the sum of each half of the bytes up a binary tree, and down again.

    The ranks of a host form a tree, so do the hosts of a region and the regions.  One that adds in
    one half's tree is mostly a leaf in the other's.  2 ceil(log2 n) rounds in a single host; chunks
    may follow each other, going up beside those that go down.  A round of a level is as slow as if
    all edges up to that level were in use; so this is no less than what the rounds take.

    Source:   "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009.
    """
    up: list[Phase] = []
    down: list[Phase] = []
    edges: list[tuple[int, int]] = []
    leaders = [(position, position) for position in range(len(group))]
    for key in (group.host, group.region, np.zeros(len(group), np.int64)):
        gathered: dict[int, list[tuple[int, int]]] = {}
        for pair in leaders:
            gathered.setdefault(int(key[pair[0]]), []).append(pair)
        leaders = [(them[0][0], them[_second(0, len(them))][1]) for them in gathered.values()]
        depth = doublings(max(map(len, gathered.values())))
        if depth:
            edges += [edge for them in gathered.values() for edge in _edges(them)]
            up.append(at_once(group, _halves_along(edges), depth))
            down.append(at_once(group, _halves_along(edges).back(), depth))
    both = _halves_along(edges + [(parent, child) for child, parent in edges])
    return CollectivePhases((*up, *reversed(down)), at_once(group, both))


def _halves_along(edges: Sequence[tuple[int, int]]) -> Messages:
    source, target = np.array(edges, np.int64).T
    return sent(source, target, 0.5)


def _edges(members: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (child, parent) of both trees; a member is a position for each."""
    n = len(members)
    first = [(members[at][0], members[_parent(at, n)][0]) for at in range(1, n)]
    turned = [members[_second(place, n)][1] for place in range(n)]
    second = [(turned[at], turned[_parent(at, n)]) for at in range(1, n)]
    return first + second


def _parent(at: int, n: int) -> int:
    """Return the parent of `at` in the binary tree of n places with root 0; odd ones are leaves.

    The lowest bit of `at` moves up by one, or goes where that is no place of the tree.
    """
    low = at & -at
    above = (at ^ low) | (low << 1)
    return above if above < n else at ^ low


def _second(at: int, n: int) -> int:
    """Return the member at a place of the second tree, where odd and even members swap places."""
    return n - 1 - at if n % 2 == 0 else (at + 1) % n


def level_by_level(group: Group, *, even: bool) -> tuple[Phase, ...]:
    """Return the phases of an all-gather by rings: across regions, between hosts, inside hosts.

    (R - 1) (a + S / R / H / B) + (H - 1) (a + S / H / B) + (g - 1) (a + S / g / B) where all hosts
    and regions have as many.  The ranks of a host share what it sends and gets.  Else the largest
    block counts that a ring passes on: even, all hosts of a region and all regions bring as much;
    else as their ranks do.
    """
    counts, n = HostGroups.of(group), len(group)
    regions = [[len(counts.members[host]) for host in hosts] for hosts in counts.regions]
    weights = [1 / len(regions) if even else sum(hosts) / n for hosts in regions]
    own = [
        weight / len(hosts) if even else max(hosts) / n
        for hosts, weight in zip(regions, weights, strict=True)
    ]
    phases = _across(group, [len(hosts) for hosts in regions], weights, own)
    between: list[Rounds] = []
    for hosts, weight, most in zip(regions, weights, own, strict=True):
        if len(hosts) > 1:
            link, share = group.link(BETWEEN), most + (1 - weight) / len(hosts)
            between.append(Rounds(len(hosts) - 1, link.latency_s, share, link.bytes_per_s))
    inside: list[Rounds] = []
    for size in sorted({len(them) for them in counts.members} - {1}):
        link = group.link(INSIDE)
        inside.append(Rounds(size - 1, link.latency_s, 1 / size, link.bytes_per_s))
    return (*phases, *(tuple(side) for side in (between, inside) if side))


def _across(
    group: Group, hosts: Sequence[int], weights: Sequence[float], own: Sequence[float]
) -> list[Phase]:
    """Return the rounds of a ring of regions with `hosts` each.

    weights: shares of the bytes that they bring; own: those that the host with most of it brings.
    All hosts of a region get an even part of what comes, and pass it on.
    """
    phases: list[Phase] = []
    regions = range(len(hosts))
    for turn in range(len(hosts) - 1):
        link, shares = group.link(ACROSS), list[float]()
        for at in regions:
            leaves = weights[at - 1 - turn] / hosts[at - 1] if turn else own[at - 1]
            shares += [leaves, weights[at - 1 - turn] / hosts[at]]
        phases.append((Rounds(1, link.latency_s, max(shares), link.bytes_per_s),))
    return phases


def spread_by_level(group: Group) -> tuple[Phase, ...]:
    """Return the phases of a broadcast: to all regions, to all their hosts, to all their ranks.

    In each, those that have it send it on to one more, until all have it.
    """
    counts, phases = HostGroups.of(group), list[Phase]()
    numbers = len(counts.regions), max(map(len, counts.regions)), max(map(len, counts.members))
    for level, number in zip((ACROSS, BETWEEN, INSIDE), numbers, strict=True):
        if number > 1:
            link = group.link(level)
            phases.append((Rounds(doublings(number), link.latency_s, 1.0, link.bytes_per_s),))
    return tuple(phases)


def exchange_by_host(group: Group) -> tuple[Phase, ...]:
    """Return the phases of an all-to-all: inside the hosts, then host by host.

    First rank j of a host gets from its neighbours all that is for the j-th, (j + g)-th, ... rank
    of each other host, in g - 1 rounds; then each pair of hosts exchanges at once what is between
    them, in H - 1 rounds.
    """
    n, counts = len(group), HostGroups.of(group)
    hosts = [counts.members[host] for region in counts.regions for host in region]
    sizes = [len(them) for them in hosts]
    inside: list[Rounds] = []
    for size in sorted(set(sizes) - {1}):
        link = group.link(INSIDE)
        blocks = sum(-(-other // size) for other in sizes)  # that the first one gets from each
        inside.append(Rounds(size - 1, link.latency_s, blocks / n, link.bytes_per_s))
    first, ranks = np.array([them[0] for them in hosts]), np.array(sizes)
    rounds = [
        sent(first, np.roll(first, -by), ranks * np.roll(ranks, -by) / n)
        for by in range(1, len(first))
    ]
    phases = [tuple(inside)] if inside else []
    return (*phases, *(at_once(group, messages) for messages in rounds))
