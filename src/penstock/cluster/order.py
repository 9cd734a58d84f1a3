"""Order: the hosts of a cluster in another order, which renumbers its ranks.

Where hosts have links of their own, they are cut in two where the fewest bytes per second cross,
then each part again, and so on: slow links end up between parts and are crossed once.

Source:   SPP, arXiv:2204.10562 (recursive min-cut).
          M. Stoer, F. Wagner, "A simple min-cut algorithm", 1997.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import Cluster, Host
from penstock.cluster.regions import regions_of
from penstock.errors import ClusterError

Floats: TypeAlias = NDArray[np.float64]

_FEW = 4  # groups of hosts, of which every order is tried: 24


def placed(cluster: Cluster, hosts: Sequence[str]) -> Cluster:
    """Return `cluster` with the hosts of these names first, in this order, then the others.

    Where one is named several times they are the hosts of the first ranks, one by one.
    Raises:   ClusterError: an unknown host, or one named more often than it has devices.
    """
    if not hosts:
        return cluster
    by_name = {host.name: host for host in cluster.hosts}
    count = Counter(hosts)
    for name in hosts:
        if name not in by_name or count[name] > max(1, by_name[name].num_devices):
            hint = f"name each once, or once for each rank; the cluster has {', '.join(by_name)}"
            raise ClusterError(f'hosts are {", ".join(hosts)}: "{name}"', hint=hint)
    first = tuple(by_name[name] for name in count)
    rest = tuple(h for h in cluster.hosts if h.name not in count)
    found = replace(cluster, hosts=first + rest, order=())
    if len(count) == len(hosts):
        return found
    devices = {name: iter(found.ranks_on(by_name[name])) for name in count}
    order = [next(devices[name]) for name in hosts]
    left = (rank for rank in range(found.num_ranks) if rank not in {*order})
    return replace(found, order=(*order, *left))


def host_orders(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the orders of hosts that are worth trying, by name; first that of the cluster.

    Hosts with one kind of device in one region are alike and make a group; their own order stays.
    Up to four groups: every order of them, and where two or more have several hosts, also one host
    of each group in turn (so that replicas get like devices).  Else the order as it is, and
    reversed.  Hosts that have links of their own are groups by themselves; of more than four, also
    the order of a recursive min-cut, and that with like hosts together, each from both ends, and
    with up to four groups of like hosts in the regions that their links tell of, those orders.
    """
    own = {name for pair in cluster.pairs for name in (pair.source, pair.target)}
    groups = _groups(
        cluster.hosts, [(h.region, h.name if h.name in own else "") for h in cluster.hosts]
    )
    orders = [tuple(host.name for host in cluster.hosts)]
    if len(groups) == 1:
        return tuple(orders)
    if len(groups) <= _FEW:
        return tuple(dict.fromkeys((*orders, *_orders_of(groups))))
    if not cluster.pairs:
        return orders[0], orders[0][::-1]
    orders += _by_links(cluster)
    both = itertools.chain.from_iterable((order, order[::-1]) for order in orders)
    of = {host: number for number, group in enumerate(regions_of(cluster)) for host in group}
    near = _groups(cluster.hosts, [(str(of[at]),) for at in range(len(cluster.hosts))])
    found = _orders_of(near) if 1 < len(near) <= _FEW else ()
    return tuple(dict.fromkeys((*both, *found)))


def _groups(hosts: Sequence[Host], places: Sequence[tuple[str, ...]]) -> list[list[str]]:
    """Return the hosts with the same devices in the same place, by name, as they stand."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for host, place in zip(hosts, places, strict=True):
        key = (host.device, *host.kinds, *map(str, host.memory_bytes), *place)
        groups.setdefault(key, []).append(host.name)
    return list(groups.values())


def _orders_of(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return every order of the groups, and where several have several hosts, these in turn."""
    orders: list[tuple[str, ...]] = []
    for order in itertools.permutations(groups):
        orders.append(tuple(itertools.chain.from_iterable(order)))
        if sum(len(group) > 1 for group in order) > 1:
            turns = itertools.chain.from_iterable(itertools.zip_longest(*order))
            orders.append(tuple(name for name in turns if name is not None))
    return orders


def _by_links(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the hosts in the order of a recursive min-cut, and so with like hosts together."""
    hosts, ranks = cluster.hosts, [cluster.ranks_on(host)[0] for host in cluster.hosts]
    links = np.zeros((len(hosts), len(hosts)))
    for a, b in itertools.permutations(range(len(hosts)), 2):
        links[a, b] = cluster.link(ranks[a], ranks[b]).bytes_per_s
    names = [hosts[at] for at in min_cut_order(slower_way(links), range(len(hosts)))]
    kinds = list(dict.fromkeys(host.device for host in names))
    together = sorted(names, key=lambda host: kinds.index(host.device))
    return [tuple(host.name for host in order) for order in (names, together)]


def slower_way(links: Floats) -> Floats:
    """Return bytes per second of each link, the slower of its ways; none to itself."""
    slower = np.minimum(links, links.T)
    np.fill_diagonal(slower, 0.0)
    return np.minimum(slower, np.finfo(np.float64).max / (len(links) + 1) ** 2)  # sums are numbers


def min_cut_order(links: Floats, devices: Sequence[int]) -> tuple[int, ...]:
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
    """Return one side of the minimum cut, increasing; links[a, b] counts both ways.

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
    """Return the last two devices if the most strongly tied joins next, and the last one's ties."""
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
