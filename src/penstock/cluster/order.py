"""Order: the hosts of a cluster in another order, which renumbers its ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.errors import ClusterError

_FEW = 4  # groups of hosts, of which every order is tried: 24


def placed(cluster: Cluster, hosts: Sequence[str]) -> Cluster:
    """Return `cluster` with the hosts of these names first, in this order, then the others.

    Raises:   ClusterError: an unknown host, or one named twice.
    """
    by_name = {host.name: host for host in cluster.hosts}
    for name in hosts:
        if name not in by_name or list(hosts).count(name) > 1:
            hint = f"name each once; the cluster has {', '.join(by_name)}"
            raise ClusterError(f'hosts are {", ".join(hosts)}: "{name}"', hint=hint)
    first = tuple(by_name[name] for name in hosts)
    return replace(cluster, hosts=first + tuple(h for h in cluster.hosts if h.name not in hosts))


def host_orders(cluster: Cluster) -> tuple[tuple[str, ...], ...]:
    """Return the orders of hosts that are worth trying, by name; first that of the cluster.

    Hosts with one kind of device in one region are alike and make a group; their own order stays.
    Up to four groups: every order of them, and where two or more have several hosts, also one host
    of each group in turn (so that replicas get like devices).  Else the order as it is, and
    reversed.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for host in cluster.hosts:
        groups.setdefault((host.device, host.region), []).append(host.name)
    orders = [tuple(host.name for host in cluster.hosts)]
    if len(groups) == 1:
        return tuple(orders)
    if len(groups) > _FEW:
        return orders[0], orders[0][::-1]
    for order in itertools.permutations(groups.values()):
        orders.append(tuple(itertools.chain.from_iterable(order)))
        if sum(len(group) > 1 for group in order) > 1:
            turns = itertools.chain.from_iterable(itertools.zip_longest(*order))
            orders.append(tuple(name for name in turns if name is not None))
    return tuple(dict.fromkeys(orders))
