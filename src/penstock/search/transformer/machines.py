"""Machines: the pools of a described cluster, and the fitted constants that are most like them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError, EstimateError
from penstock.estimate.constants import Constants, Quantity
from penstock.estimate.device import DEVICES, Datasheet
from penstock.estimate.transformer import Transformer
from penstock.search.transformer.found import Pool

_DTYPES = ("bfloat16", "float16")


class Pools(NamedTuple):
    """A pool for every kind of device, and bytes/s of the link between two of them."""

    pools: tuple[Pool, ...]
    between_bytes_per_s: float


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
    fastest = inside or between
    device = Datasheet(
        kind.name,
        _peak(kind),
        kind.memory_bytes_per_s,
        fastest.bytes_per_s if fastest else math.inf,
        between.bytes_per_s / each if between else fastest.bytes_per_s if fastest else math.inf,
        each,
    )
    return Pool(device, count, kind.memory_bytes, kind.usd_per_hour)


def _link(link: Link | None, needed: bool, kind: DeviceKind, level: str) -> Link | None:
    if needed and link is None:
        message = f'the cluster has no link {level}, and "{kind.name}" needs one'
        raise ClusterError(message, hint=f"describe [{level}]")
    return link


def _peak(kind: DeviceKind) -> float:
    known = dict(kind.flop_per_s)
    for dtype in _DTYPES:
        if dtype in known:
            return known[dtype]
    return kind.peak_flop_per_s(_DTYPES[0])  # raises, and says which are known


def most_alike(
    quantity: Quantity, model: Transformer, pools: Sequence[Pool], constants: Sequence[Constants]
) -> Constants:
    """Return the constants for all candidates: of the devices with the nearest peak, then those
    outside of whose ranges fewest sizes are, then those with the smallest error.

    Of memory the device does not count.
    Raises:   EstimateError: there are none of this quantity.
    """
    usable = [item for item in constants if item.quantity == quantity]
    if not usable:
        raise EstimateError(f"no constants of {quantity}", hint="fit them on a file that has it")
    peak = sum(pool.device.peak_flop_per_s * pool.count for pool in pools)
    peak /= sum(pool.count for pool in pools)
    sizes = {
        "hidden size": model.hidden,
        "blocks": model.blocks,
        "sequence": model.sequence,
        "ranks": sum(pool.count for pool in pools),
    }

    def distance(item: Constants) -> tuple[float, int, float, int]:
        outside = sum(_is_outside(item, name, size) for name, size in sizes.items())
        apart = _apart(item, peak) if quantity == "time" else 0.0
        return apart, outside, item.error, -item.runs

    return min(usable, key=distance)


def _is_outside(item: Constants, name: str, size: int) -> bool:
    least, most = item.seen[name]
    return not float(least) <= size <= float(most)


def _apart(item: Constants, peak: float) -> float:
    """Return how far, by factors of 2, the nearest device fitted on is from `peak`."""
    names = {str(name) for names in [item.seen["device"]] for name in names}
    near = [device.peak_flop_per_s for device in DEVICES if device.name in names]
    return min((round(abs(math.log2(each / peak)), 1) for each in near), default=math.inf)
