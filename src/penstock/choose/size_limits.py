"""Size limits: what the sizes alone decide, before a job is examined and anything is measured.

A pipeline has at most one stage more than the traced step has cut points, a replica at least one
micro-batch or a part of one.  What neither allows is refused by one trace, in a process of its own:
nothing of the job has been moved by it when the examination begins.
"""

from penstock.choose.joined_counts import ways_to_divide
from penstock.choose.prepare import traced
from penstock.cluster.cluster import Cluster
from penstock.errors import GraphError, PlanError
from penstock.graph.graph import Graph
from penstock.job import Job
from penstock.listener import SILENT, Listener
from penstock.processes.child import apart, can_fork
from penstock.search.shapes import Fixed, nothing_fits, shapes


def check_soon(job: Job, fixed: Fixed, listener: Listener) -> None:
    """Raise where no plan has so many ranks or stages; a step is traced only where that is likely.

    Raises:   PlanError: it says how many cut points and micro-batches there are.
    """
    if max(fixed.ranks or 1, fixed.stages or 1) <= job.micro_batches or not can_fork():
        return
    if (fixed.tensor or 1) > 1:
        return

    def asked() -> None:
        try:
            graph = traced(job, SILENT, rules=fixed.rules).graph
        except GraphError:  # it is trained without a plan
            return
        check_sizes(job, graph, fixed)

    with listener.busy("looking whether so many ranks can be used"):
        apart(asked)


def check_sizes(job: Job, graph: Graph, fixed: Fixed) -> None:
    """Raise where a step cannot be divided as asked, whatever it takes.

    Raises:   PlanError: it says how many cut points and micro-batches there are.
    """
    cluster = Cluster.here(fixed.ranks)
    parts = ways_to_divide(job, fixed, graph.samples, cluster.num_ranks)
    counts = [job.micro_batches, *(int(job.micro_batches / part) for part in parts)]
    problem: PlanError | None = None
    for count in counts:
        if next(shapes(graph, cluster, count, fixed), None) is not None:
            return
        problem = problem or nothing_fits(graph, cluster, count, fixed)
    if problem is not None:
        raise problem
