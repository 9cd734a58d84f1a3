"""Machines: the pools of a described cluster, and the fitted constants that are most like them."""

import math
from collections.abc import Sequence

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError
from penstock.estimate.constants import Constants
from penstock.estimate.pool import Pooled
from penstock.estimate.predict import pool_of
from penstock.estimate.priors import Quantity
from penstock.estimate.site import site_of
from penstock.estimate.traced import peak_of, sheet_of
from penstock.search.transformer.found import Pool, Pools


def machines_of(cluster: Cluster) -> Pools:
    """Return the pools of `cluster`, one for each kind of device, in the order of its hosts.

    A device has its share of the link between hosts.

    Ignores:  latencies, and that a kind's hosts may stand in several regions.
    Raises:   ClusterError: no FLOP/s of 16-bit numbers; hosts of one kind with other numbers of
              devices; a link that is needed is not described; pairs of hosts with their own.
    """
    if cluster.pairs:
        message = f"the cluster has links of {len(cluster.pairs)} pairs of hosts"
        hint = "leave out [[pair]], and describe [between] or [across] by the slowest of them"
        raise ClusterError(message, hint=hint)
    by_kind: dict[str, list[Host]] = {}
    for host in cluster.hosts:
        by_kind.setdefault(host.device, []).append(host)
    kinds = {kind.name: kind for kind in cluster.devices}
    pools = tuple(_pool(kinds[name], hosts, cluster) for name, hosts in by_kind.items())
    far = {host.region for host in cluster.hosts}
    link = cluster.across if len(far) > 1 else cluster.between
    if len(pools) > 1 and link is None:
        level = "across" if len(far) > 1 else "between"
        message = f"the cluster has no link {level}, and {len(pools)} kinds of devices"
        raise ClusterError(message, hint=f"describe [{level}]")
    return Pools(pools, math.inf if link is None else link.bytes_per_s)


def _pool(kind: DeviceKind, hosts: Sequence[Host], cluster: Cluster) -> Pool:
    each, count = hosts[0].num_devices, sum(host.num_devices for host in hosts)
    odd = next((host for host in hosts if host.num_devices != each), None)
    if odd is not None:
        message = f'host "{odd.name}" has {odd.num_devices} "{kind.name}", others {each}'
        raise ClusterError(message, hint="give all hosts of a kind as many devices")
    inside = _link(cluster.inside, each > 1, kind, "inside")
    between = _link(cluster.between, len(hosts) > 1, kind, "between")
    device = sheet_of(kind, _peak(kind), (inside, between), each)
    return Pool(device, count, kind.memory_bytes, kind.usd_per_hour)


def _link(link: Link | None, needed: bool, kind: DeviceKind, level: str) -> Link | None:
    if needed and link is None:
        message = f'the cluster has no link {level}, and "{kind.name}" needs one'
        raise ClusterError(message, hint=f"describe [{level}]")
    return link


def _peak(kind: DeviceKind) -> float:
    peak = peak_of(kind)
    return kind.peak_flop_per_s("bfloat16") if peak is None else peak  # raises: which are known


def constants_for(
    quantity: Quantity, pools: Sequence[Pool], known: Sequence[Pooled], *, cluster: str = ""
) -> Constants:
    """Return the constants for all candidates on these devices, by what like machines tell.

    Half of the candidates shard weights, so they stand half-way.
    Raises:   EstimateError: there are none of this quantity.
    """
    devices = [pool.device for pool in pools for _ in range(pool.count)]
    place = site_of(devices, len(devices), sharded=0.5)
    return pool_of(quantity, known).at(place, cluster)
