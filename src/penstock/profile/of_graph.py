"""Profile of a graph that is measured here, by the job it was traced from."""

from dataclasses import replace

from penstock.cluster.cluster import Cluster
from penstock.graph.graph import Graph
from penstock.graph.traced_graph import capture_of
from penstock.job import Job
from penstock.profile.profile import Profile


def measure(graph: Graph, job: Job | None = None, *, beside: int = 0) -> Profile:
    """Return the profile of `graph` on this machine, one thread.

    Its kind is that of `Cluster.here`: "cpu", or the name of the accelerator.
    job:      needed for a graph that was loaded from a file.
    beside:   other ranks that will compute at the same time on this host.
    Ignores:  what messages cost (that is the Cluster's) and reading the data.
    Raises:   GraphError: no job is known, or it traces to another graph.
    """
    import torch

    from penstock.profile.measure import measure as measure_capture

    captured, known = capture_of(graph, job)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        profile = measure_capture(captured, known, beside=beside)
    finally:
        torch.set_num_threads(threads)
    return replace(profile, kind=kind_here())


def kind_here() -> str:
    """Return the name that `Cluster.here` gives to the devices of this machine."""
    return Cluster.here(1).devices[0].name
