"""Device kinds: the step's profile on each kind of device of a cluster, here or elsewhere.

A run is only on devices that are here, so nothing that trains imports this.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.choose.prepare import measured_as
from penstock.cluster.cluster import Cluster, DeviceKind
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.listener import Listener

if TYPE_CHECKING:
    from penstock.graph.trace import Capture
    from penstock.profile.profile import Profile


def profiled(
    captured: "Capture", job: Job, cluster: Cluster, listener: Listener
) -> "tuple[Profile, ...]":
    """Return a profile of the step for each kind of device of the cluster.

    That of this machine (as `Cluster.here` names it) is measured, beside as many ranks as a host
    will have; others are estimated, by what runs on them have told (profile/latency.py).
    Raises:   ClusterError: a device that is not here has no FLOP/s for the dtype of a product.
    """
    from penstock.graph.wire import wire_choices
    from penstock.processes.child import apart
    from penstock.profile.estimate import kinds_of
    from penstock.profile.measure import optimizer_state
    from penstock.profile.of_graph import kind_here

    kinds, here = kinds_of(cluster), kind_here()
    wire = wire_choices(job.fewest_bits)
    is_here = all(kind.name == here for kind in kinds)
    state = 0.0 if is_here else optimizer_state(captured, job, apart)
    return tuple(
        measured_as(here, captured, job, cluster, listener)
        if kind.name == here
        else _estimated(captured.graph, kind, cluster, state, wire)
        for kind in kinds
    )


def _estimated(
    graph: Graph, kind: DeviceKind, cluster: Cluster, state: float, wire: tuple[int, ...]
) -> "Profile":
    """Return the estimate for devices that are not here, as runs on such devices have taught it."""
    from penstock.estimate.traced import estimated_in
    from penstock.files import cache_folder
    from penstock.profile.estimate import estimated
    from penstock.profile.kept_profiles import samples_of
    from penstock.profile.latency import learned, parts_of

    known = learned(samples_of(cache_folder("profiles"), kind))
    if not known.samples:
        return estimated_in(cluster, graph, kind, state, wire=wire)
    profile = estimated(graph, kind, state, known.efficiency, wire=wire)
    error = known.error(parts_of(graph, range(len(graph.nodes)), kind))
    return replace(profile, basis=replace(profile.basis, samples=known.samples, error=error))
