"""Traced: the profile of a traced step on devices that are not here, by the pool of constants.

The constants are those by which described runs are predicted (pool.py): the share of the peak that
products and attention reach, that of the memory's bandwidth, and the seconds of a launch.  So a
traced job and a transformer that is described in the same sizes take the same seconds.  A device
without FLOP/s of 16-bit numbers is no accelerator that the pool knows of: it has the usual shares
of its peaks (profile/roofline.py).

Ignores:  what the constants say of links: a cluster's links are taken at the rates that it gives.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.cluster.cluster import Cluster, DeviceKind, Link
from penstock.estimate.constants import Constants
from penstock.estimate.datasheet import DEVICES, Datasheet, usual_power_w
from penstock.estimate.pool import Pooled
from penstock.estimate.predict import pool_of
from penstock.estimate.shipped import load
from penstock.estimate.site import site_of
from penstock.estimate.work import flash_times
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.profile.estimate import estimated, kinds_of
from penstock.profile.profile import Profile
from penstock.profile.roofline import DEFAULT, Efficiency, OpClass, op_seconds

_DTYPES = ("bfloat16", "float16")
_SHARDED = 0.5  # of plans some divide the weights: the constants stand half-way


def estimate(graph: Graph, cluster: Cluster, job: Job | None = None) -> tuple[Profile, ...]:
    """Return a profile of `graph` for each kind of device of `cluster`, from the device's peaks.

    job:      needed for a graph that was loaded from a file: it says what the optimizer keeps.
    Ignores:  what `estimated` and `optimizer_state` ignore.
    Raises:   GraphError: no job is known, or it traces to another graph.
              ClusterError: a device has no FLOP/s for the dtype of a product.
    """
    from penstock.graph.traced_graph import capture_of
    from penstock.graph.wire import wire_choices
    from penstock.profile.measure import optimizer_state

    captured, known = capture_of(graph, job, values=False)
    state = optimizer_state(captured, known)
    wire = wire_choices(known.fewest_bits)
    return tuple(estimated_in(cluster, graph, kind, state, wire=wire) for kind in kinds_of(cluster))


def estimated_in(
    cluster: Cluster, graph: Graph, kind: DeviceKind, state: float, *, wire: Sequence[int] = ()
) -> Profile:
    """Return the profile that `graph` would have on a kind of device of a cluster.

    state:    bytes that the optimizer keeps per byte of parameter.
    Raises:   ClusterError: the device has no FLOP/s for the dtype of a product.
    """
    constants = constants_on(kind, cluster, load())
    if constants is None:
        return estimated(graph, kind, state, wire=wire)
    efficiency = efficiency_of(constants, kind)
    profile = estimated(graph, kind, state, efficiency, wire=wire)
    return replace(profile, basis=replace(profile.basis, error=_error(graph, kind, constants)))


def peak_of(kind: DeviceKind) -> float | None:
    """Return the FLOP/s of 16-bit numbers; None where the cluster does not say them."""
    known = dict(kind.flop_per_s)
    return next((known[dtype] for dtype in _DTYPES if dtype in known), None)


def sheet_of(
    kind: DeviceKind, peak_flop_per_s: float, links: tuple[Link | None, Link | None], each: int
) -> Datasheet:
    """Return the data sheet of a kind of device in hosts of `each`.

    A device has its share of the link between hosts.  Its watts are those of a device that is known
    by this name, else what is usual for its peak.
    links:    inside a host, and between hosts; None: there is none.
    """
    inside, between = links
    fastest = inside or between
    known = [device for device in DEVICES if device.name == kind.name]
    return Datasheet(
        kind.name,
        peak_flop_per_s,
        kind.memory_bytes_per_s,
        fastest.bytes_per_s if fastest else math.inf,
        between.bytes_per_s / each if between else fastest.bytes_per_s if fastest else math.inf,
        each,
        power_w=known[0].power_w if known else usual_power_w(peak_flop_per_s),
        memory_bytes=kind.memory_bytes,
        is_hopper=bool(known) and known[0].is_hopper,
    )


def constants_on(kind: DeviceKind, cluster: Cluster, pools: Sequence[Pooled]) -> Constants | None:
    """Return the constants of time for a kind of device; None: it is none that they know."""
    peak = peak_of(kind)
    if peak is None:
        return None
    each = max(
        host.num_devices for host in cluster.hosts if kind.name in (host.device, *host.kinds)
    )
    device = sheet_of(kind, peak, (cluster.inside, cluster.between), each)
    return pool_of("time", pools).at(site_of([device], cluster.num_ranks, sharded=_SHARDED))


def efficiency_of(constants: Constants, kind: DeviceKind) -> Efficiency:
    """Return the shares that ops reach by these constants; a convolution is a product.

    Attention is that of torch, whose kernels are of Ampere's kind.
    """
    values = constants.values
    moved = 1 / values["bytes"]
    share: dict[OpClass, float] = {name: moved for name, _ in DEFAULT.share}
    is_hopper = any(device.is_hopper for device in DEVICES if device.name == kind.name)
    attention = values["attention"] * flash_times("fused", is_hopper=is_hopper)
    share |= {"product": 1 / values["products"], "attention": 1 / attention}
    share["convolution"] = share["product"]
    return Efficiency(tuple(share.items()), launch_s=0.0, host_s=values["launches"])


def _error(graph: Graph, kind: DeviceKind, constants: Constants) -> float:
    """Return twice the relative deviation that the doubt of the constants leaves.

    By how much the seconds of the step change with each of them.
    """
    names = ("products", "attention", "bytes", "launches")
    usual = sum(op_seconds(graph, kind, efficiency_of(constants, kind)))
    if not usual:
        return 0.0
    parts: list[float] = []
    for name in names:
        values = constants.values | {name: constants.values[name] * 1.01}
        efficiency = efficiency_of(replace(constants, values=values), kind)
        changed = sum(op_seconds(graph, kind, efficiency))
        parts.append((changed / usual - 1) / 0.01 * constants.doubt[name])
    return 2 * math.sqrt(float(np.square(parts).sum()) + constants.spread**2)
