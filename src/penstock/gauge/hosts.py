"""Hosts: ranks find out where they run, measure the links between them, and make a cluster.

Every rank runs some benchmark tasks, and every pair of hosts is compared by a minimal and a large
payload.  From that follow the regions, where nobody named any, and which hosts compute alike
(cluster/regions.py).  One pair of ranks of each level (inside a host, between hosts, across
regions) is then measured in full: the pair of hosts that is the median of its level.  Pairs that
are far from it get a link of their own.
"""

import json
import os
import statistics
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from penstock.cluster.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.cluster.machine import HERE
from penstock.cluster.regions import Groups, alike, regions, seconds_per_byte
from penstock.errors import RunError
from penstock.gauge.benchmark import Benchmark, benchmark
from penstock.gauge.links import (
    EDGES,
    PAYLOADS,
    Probe,
    compare,
    payloads,
    probe,
    probe_of,
)
from penstock.transport.shared_memory import available, host_key
from penstock.transport.transport import Transport
from penstock.typed import typed

Pair = tuple[int, int]
_MOST_INSIDE = 8  # ranks of a host, of which all pairs are compared
_FEW = 5  # hosts, of which all pairs are compared in the midst of a run
_UNEVEN = 1.5  # a byte between two hosts takes so many times as long as on their level, or less


class Seat(NamedTuple):
    """Where a rank runs: two ranks share a host exactly if they have the same `key`."""

    key: str
    name: str
    region: str


class Compared(NamedTuple):
    """Two hosts, and the seconds that a minimal and a large payload take between them.

    Or two ranks of one host.  sizes: of the payloads.
    """

    hosts: Pair
    small_s: float
    large_s: float
    sizes: Pair = PAYLOADS

    @property
    def byte_s(self) -> float:
        """Return the seconds of each byte beyond a minimal payload."""
        small, large = self.sizes
        return max(self.large_s - self.small_s, 1e-9) / (large - small)

    @property
    def capability(self) -> float:
        """Return the seconds a byte of a large payload, the minimal one's included."""
        return seconds_per_byte(self.byte_s, self.small_s, self.sizes[1])


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found: the machines with their links, and what the links were made from.

    probes:      by level.
    benchmarks:  of each host, the median of its ranks.
    near:        the regions that pairs of hosts tell of, by numbers of hosts; those of the
                 cluster, unless they were named.
    inside:      pairs of ranks of the first host of several, where links may differ there.
    """

    cluster: Cluster
    compared: tuple[Compared, ...]
    probes: tuple[tuple[str, Probe], ...]
    benchmarks: tuple[Benchmark, ...] = ()
    near: Groups = ()
    inside: tuple[Compared, ...] = ()


def place_key() -> str:
    """Return a text that two processes have in common exactly if they are on one host.

    A network namespace counts as a host of its own: what reaches it goes over a network.  So does
    a process that cannot share memory.
    """
    own = "" if available()[0] else f" {os.getpid()}"
    return f"{host_key()} {os.readlink('/proc/self/ns/net')}{own}"


def seat_here(name: str, region: str) -> Seat:
    """Return the seat of this process."""
    return Seat(f"{host_key()} {os.readlink('/proc/self/ns/net')}", name, region)


def survey(transport: Transport, seat: Seat) -> Survey:
    """Return all hosts with their devices and measured links; every rank calls it, and gets it.

    FLOP/s and memory bandwidth are the round guesses of `Cluster.here`; of hosts that compute
    more slowly than others with the same guesses, so much less.
    Raises:   RunError: the ranks of a host are not numbered one after another, or are in
              several regions.
    """
    seats = [Seat(*row) for row in _told(transport, seat)]
    homes = homes_of(seats)
    own = next(len(home) for home in homes if transport.rank in home)
    here = Cluster.here(own)
    kinds = [typed(DeviceKind, told) for told in _told(transport, asdict(here.devices[0]))]
    cores = _told(transport, here.hosts[0].cores)
    benchmarks = _benchmarks(transport, homes)
    compared: list[Compared] = []
    for hosts in combinations(range(len(homes)), 2):
        first, second = (homes[host][0] for host in hosts)
        found = _told(transport, compare(transport, (first, second)))[first]
        compared.append(Compared(hosts, *found, sizes=payloads(transport)))
    near = near_hosts(len(homes), compared)
    seats = in_regions(seats, homes, near)
    inside = _inside(transport, homes)
    probes = tuple(
        (level, probe_of(_told(transport, probe(transport, pair))[pair[0]]))
        for level, pair in pairs_of(homes, seats, compared, inside)
    )
    links = {level: found.link for level, found in probes}
    kinds = told_apart(homes, kinds, [each.seconds for each in benchmarks])
    cluster = cluster_of(homes, seats, kinds, links, cores)
    cluster = replace(cluster, pairs=uneven_pairs(cluster, compared))
    return Survey(cluster, tuple(compared), probes, benchmarks, near, inside)


def link_inside(transport: Transport) -> Link:
    """Return the link between the ranks of this host, all there are: the slowest of any pair.

    Every rank calls it, and gets it.
    """
    everyone = tuple(range(transport.num_ranks))
    pair = slowest(_inside(transport, (everyone,))) or (0, 1)
    return probe_of(_told(transport, probe(transport, pair))[pair[0]]).link


def _inside(transport: Transport, homes: Sequence[tuple[int, ...]]) -> tuple[Compared, ...]:
    """Return what payloads take between pairs of ranks of the first host that has several.

    Nothing where all pairs are alike, as cores are.
    """
    home = next((home for home in homes if len(home) > 1), ())
    if not (transport.is_queued and home):
        return ()
    found: list[Compared] = []
    for pair in combinations(home[:_MOST_INSIDE], 2):
        told = _told(transport, compare(transport, pair))[pair[0]]
        found.append(Compared(pair, *told, sizes=payloads(transport)))
    return tuple(found)


def slowest(compared: Sequence[Compared]) -> Pair | None:
    """Return the pair whose large payload takes longest."""
    return max(compared, key=lambda each: each.large_s).hosts if compared else None


def compared_now(
    transport: Transport, seat: Seat, used: Collection[Pair], first_edge: int
) -> list[Compared]:
    """Return what payloads take between pairs of hosts now, in the midst of a run.

    Of up to five hosts all pairs, else those with ranks that use the link between them.
    used:        pairs of ranks that do.
    first_edge:  from which on no edge is used.
    Every rank calls it, with the same pairs, and gets it.
    """
    homes = homes_of([Seat(*row) for row in _told(transport, seat)])
    of = {rank: host for host, home in enumerate(homes) for rank in home}
    pairs = {(min(of[a], of[b]), max(of[a], of[b])) for a, b in used if of[a] != of[b]}
    if len(homes) <= _FEW:
        pairs = set(combinations(range(len(homes)), 2))
    found: list[Compared] = []
    for a, b in sorted(pairs):
        pair = homes[a][0], homes[b][0]
        found.append(
            Compared(
                (a, b),
                *_told(transport, compare(transport, pair, first_edge))[pair[0]],
                sizes=payloads(transport),
            )
        )
        first_edge += EDGES
    return found


def _benchmarks(transport: Transport, homes: Sequence[tuple[int, ...]]) -> tuple[Benchmark, ...]:
    """Return what the ranks of each host compute while all do: of each task the median."""
    transport.barrier()
    rows = [Benchmark(*row) for row in _told(transport, benchmark())]
    return tuple(
        Benchmark(*(statistics.median(column) for column in zip(*own, strict=True)))
        for own in ([rows[rank] for rank in home] for home in homes)
    )


def near_hosts(num_hosts: int, compared: Sequence[Compared]) -> Groups:
    """Return the regions that the comparison of all pairs tells of, by numbers of hosts."""
    apart = np.ones((num_hosts, num_hosts))
    for each in compared:
        a, b = each.hosts
        apart[a, b] = apart[b, a] = each.capability
    return regions(apart)


def in_regions(seats: Sequence[Seat], homes: Sequence[tuple[int, ...]], near: Groups) -> list[Seat]:
    """Return the seats in the regions that were found; in their own, where any is named."""
    if len(near) == 1 or {seat.region for seat in seats} != {HERE}:
        return list(seats)
    of = {host: f"region-{number}" for number, group in enumerate(near, 1) for host in group}
    named = {rank: of[host] for host, home in enumerate(homes) for rank in home}
    return [seat._replace(region=named[rank]) for rank, seat in enumerate(seats)]


def told_apart(
    homes: Sequence[tuple[int, ...]], kinds: Sequence[DeviceKind], seconds: Sequence[float]
) -> list[DeviceKind]:
    """Return the kinds of devices by rank; hosts that take longer for the same are of others.

    kinds:    as ranks see themselves.
    seconds:  of each host, for a piece of training.
    """
    found = list(kinds)
    for kind in dict.fromkeys(kinds[home[0]] for home in homes):
        own = [host for host, home in enumerate(homes) if kinds[home[0]] == kind]
        groups = [[own[at] for at in group] for group in alike([seconds[host] for host in own])]
        middle = [statistics.median(seconds[host] for host in group) for group in groups]
        for group, each_s in zip(groups, middle, strict=True):
            slower = _slower(kind, float(f"{each_s / min(middle):.1e}"))
            for rank in (rank for host in group for rank in homes[host]):
                found[rank] = slower
    return found


def _slower(kind: DeviceKind, times: float) -> DeviceKind:
    rates = tuple((dtype, rate / times) for dtype, rate in kind.flop_per_s)
    moved = kind.memory_bytes_per_s / times
    return replace(kind, flop_per_s=rates, memory_bytes_per_s=moved)


def uneven_pairs(cluster: Cluster, compared: Sequence[Compared]) -> tuple[HostPair, ...]:
    """Return the pairs of hosts whose messages take far longer than on their level, or less.

    Their links are the level's, with latency and seconds a byte as much longer as they took.
    """
    pairs: list[HostPair] = []
    by_level: dict[bool, list[Compared]] = {}
    for each in compared:
        a, b = (cluster.hosts[host].region for host in each.hosts)
        by_level.setdefault(a != b, []).append(each)
    for is_across, rows in by_level.items():
        middle, link = _middle(rows), cluster.across if is_across else cluster.between
        for each in rows:
            times = each.capability / middle.capability
            if link is not None and not 1 / _UNEVEN < times < _UNEVEN:
                a, b = (cluster.hosts[host].name for host in each.hosts)
                latency_s = link.latency_s * each.small_s / max(middle.small_s, 1e-9)
                rate = link.bytes_per_s * middle.byte_s / each.byte_s
                own = link.overhead_s, link.copy_bytes_per_s, link.slowdown
                pairs.append(HostPair(a, b, latency_s, rate, *own))
    return tuple(pairs)


def measured_kinds(cluster: Cluster, benchmarks: Sequence[Benchmark]) -> Cluster:
    """Return `cluster` with what its devices compute as measured, to two digits, not guessed.

    benchmarks:  of each host; of a kind of device on several hosts, the median.
    """
    found: list[DeviceKind] = []
    for kind in cluster.devices:
        rows = zip(cluster.hosts, benchmarks, strict=True)
        own = [each for host, each in rows if host.device == kind.name]
        flop_s, byte_s = (statistics.median(column) for column in list(zip(*own, strict=True))[:2])
        single = "float32", float(f"{1 / flop_s:.1e}")
        others = kind.flop_per_s if kind.copy_engine else ()  # of an accelerator those stay guesses
        rates = (single, *(each for each in others if each[0] != "float32"))
        moved = float(f"{1 / byte_s:.1e}")
        found.append(replace(kind, flop_per_s=rates, memory_bytes_per_s=moved))
    return replace(cluster, devices=tuple(found))


def _told(transport: Transport, own: object) -> list[Any]:
    """Return what every rank reports."""
    everyone = tuple(range(transport.num_ranks))
    return list(map(json.loads, transport.all_gather_bytes(json.dumps(own).encode(), everyone)))


def homes_of(seats: Sequence[Seat]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, hosts by their first rank.

    Raises:   RunError: as `survey`.
    """
    keys = list(dict.fromkeys(seat.key for seat in seats))
    homes = [tuple(r for r, seat in enumerate(seats) if seat.key == key) for key in keys]
    for home in homes:
        name, regions = seats[home[0]].name, sorted({seats[rank].region for rank in home})
        if len(regions) > 1:
            hint = "give the same region to all ranks of a host"
            raise RunError(f"host {name} is in the regions {', '.join(regions)}", hint=hint)
        if home[-1] - home[0] != len(home) - 1:
            listed = ", ".join(map(str, home))
            hint = "start all ranks of a host with one torchrun"
            raise RunError(f"host {name} has the ranks {listed}, not one after another", hint=hint)
    return tuple(homes)


def pairs_of(
    homes: Sequence[tuple[int, ...]],
    seats: Sequence[Seat],
    compared: Sequence[Compared],
    inside: Sequence[Compared] = (),
) -> list[tuple[str, Pair]]:
    """Return for each level that there is the two ranks between which it is measured.

    Inside: the first host of several ranks; of pairs that were compared the slowest.  Else the pair
    of hosts whose large payload takes the median time; of an even number the slower one in the
    middle.
    """
    found: list[tuple[str, Pair]] = []
    several = [home for home in homes if len(home) > 1]
    if several:
        found.append(("inside", slowest(inside) or (several[0][0], several[0][1])))
    for level, is_across in (("between", False), ("across", True)):
        there = [each for each in compared if _is_across(each, homes, seats) == is_across]
        if there:
            a, b = _middle(there).hosts
            found.append((level, (homes[a][0], homes[b][0])))
    return found


def _middle(compared: Sequence[Compared]) -> Compared:
    """Return the pair of hosts whose large payload takes the median time."""
    return sorted(compared, key=lambda each: each.large_s)[len(compared) // 2]


def _is_across(compared: Compared, homes: Sequence[tuple[int, ...]], seats: Sequence[Seat]) -> bool:
    a, b = (seats[homes[host][0]].region for host in compared.hosts)
    return a != b


def cluster_of(
    homes: Sequence[tuple[int, ...]],
    seats: Sequence[Seat],
    kinds: Sequence[DeviceKind],
    links: dict[str, Link],
    cores: Sequence[int] = (),
) -> Cluster:
    """Return the cluster; names that several hosts or unlike devices have get a number.

    cores:  that the ranks of a host share, by rank; empty: each has its own.
    """
    devices: dict[DeviceKind, DeviceKind] = {}
    hosts: list[Host] = []
    for home in homes:
        kind, seat = kinds[home[0]], seats[home[0]]
        if kind not in devices:
            taken = [device.name for device in devices.values()]
            devices[kind] = replace(kind, name=_free(kind.name, taken))
        name = _free(seat.name, [host.name for host in hosts])
        own = cores[home[0]] if cores else 0
        hosts.append(Host(name, devices[kind].name, len(home), seat.region, own))
    between, across = links.get("between"), links.get("across")
    there = tuple(devices.values()), tuple(hosts)
    return Cluster(*there, inside=links.get("inside"), between=between, across=across)


def _free(name: str, taken: Sequence[str]) -> str:
    """Return `name`, or with the first number from 2 on that makes it no other's."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    return free
