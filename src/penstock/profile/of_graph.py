"""Measure a graph: by the job that it was traced from, or one that traces to it."""

from penstock.graph.graph import Graph
from penstock.graph.traced import capture_of
from penstock.job import Job
from penstock.profile.profile import Profile


def measure(graph: Graph, job: Job | None = None, *, beside: int = 0) -> Profile:
    """Return the profile of `graph` on this machine, one thread.

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
        return measure_capture(captured, known, beside=beside)
    finally:
        torch.set_num_threads(threads)
