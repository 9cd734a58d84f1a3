"""Hosts: ranks find out where they run, measure the links between them, and make a cluster.

Every pair of hosts is compared by a minimal and a large payload; one pair of ranks of each level
(inside a host, between hosts, across regions) is then measured in full: the pair of hosts that
is the median of its level.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import RunError
from penstock.runtime.links import Probe, compare, probe, probe_of
from penstock.runtime.transport import Transport
from penstock.runtime.transport.shared_memory import available, host_key
from penstock.typed import typed

Pair = tuple[int, int]


class Seat(NamedTuple):
    """Where a rank runs: two ranks share a host exactly if they have the same `key`."""

    key: str
    name: str
    region: str


class Compared(NamedTuple):
    """Two hosts, and the seconds that a minimal and a large payload take between them."""

    hosts: Pair
    small_s: float
    large_s: float


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found: the machines with their links, and what the links were made from."""

    cluster: Cluster
    compared: tuple[Compared, ...]
    probes: tuple[tuple[str, Probe], ...]  # by level


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

    FLOP/s and memory bandwidth are the round guesses of `Cluster.here`.
    Raises:   RunError: the ranks of a host are not numbered one after another, or are in
              several regions.
    """
    seats = [Seat(*row) for row in _told(transport, seat)]
    homes = homes_of(seats)
    own = next(len(home) for home in homes if transport.rank in home)
    here = Cluster.here(own)
    kinds = _told(transport, asdict(here.devices[0]))
    cores = _told(transport, here.hosts[0].cores)
    compared: list[Compared] = []
    for hosts in combinations(range(len(homes)), 2):
        first, second = (homes[host][0] for host in hosts)
        found = _told(transport, compare(transport, (first, second)))[first]
        compared.append(Compared(hosts, *found))
    probes = tuple(
        (level, probe_of(_told(transport, probe(transport, pair))[pair[0]]))
        for level, pair in pairs_of(homes, seats, compared)
    )
    links = {level: found.link for level, found in probes}
    cluster = cluster_of(homes, seats, [typed(DeviceKind, told) for told in kinds], links, cores)
    return Survey(cluster, tuple(compared), probes)


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
            hint = "give the same --region to all ranks of a host"
            raise RunError(f"host {name} is in the regions {', '.join(regions)}", hint=hint)
        if home[-1] - home[0] != len(home) - 1:
            listed = ", ".join(map(str, home))
            hint = "start all ranks of a host with one torchrun"
            raise RunError(f"host {name} has the ranks {listed}, not one after another", hint=hint)
    return tuple(homes)


def pairs_of(
    homes: Sequence[tuple[int, ...]], seats: Sequence[Seat], compared: Sequence[Compared]
) -> list[tuple[str, Pair]]:
    """Return for each level that there is the two ranks between which it is measured.

    Inside: the first host of several ranks.  Else the pair of hosts whose large payload takes the
    median time; of an even number the slower one in the middle.
    """
    found: list[tuple[str, Pair]] = []
    several = [home for home in homes if len(home) > 1]
    if several:
        found.append(("inside", (several[0][0], several[0][1])))
    for level, is_across in (("between", False), ("across", True)):
        there = [each for each in compared if _is_across(each, homes, seats) == is_across]
        if there:
            middle = sorted(there, key=lambda each: each.large_s)[len(there) // 2]
            a, b = middle.hosts
            found.append((level, (homes[a][0], homes[b][0])))
    return found


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
