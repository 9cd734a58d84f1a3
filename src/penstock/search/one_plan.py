"""Search for one plan: what `search` finds, without the candidates that it beat."""

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError
from penstock.graph.graph import Graph
from penstock.graph.traced_graph import Traced
from penstock.plan.plan import Plan
from penstock.profile.kinds import Profiles
from penstock.search.candidate import Objective
from penstock.search.search import search as search_all
from penstock.search.shapes import Fixed
from penstock.search.simplest import ERROR


def search(
    graph: Graph,
    profiles: Profiles,
    cluster: Cluster,
    *,
    objective: Objective = "time",
    micro_batches: int | None = None,
    fixed: Fixed = Fixed(),  # noqa: B008 - a frozen record
) -> Plan:
    """Return the best plan, with its reasons and what is predicted of it.

    Of plans predicted to be as fast, within the usual error, the simplest is taken.

    micro_batches:  per step over all replicas; default: those of the graph's job.
    Raises:         PlanError: nothing fits what is fixed, or the memory; a graph from a file
                    without micro_batches.
    """
    job = graph.job if isinstance(graph, Traced) else None
    if micro_batches is None and job is not None:
        micro_batches = job.micro_batches
    if micro_batches is None:
        message = f"graph {graph.digest} does not know how many micro-batches make a step"
        raise PlanError(message, hint="give micro_batches=, or the graph that `trace` returned")
    found = search_all(
        graph,
        profiles,
        cluster,
        micro_batches=micro_batches,
        objective=objective,
        error=ERROR,
        clip=job is not None and job.awaits_all,
        fixed=fixed if job is None else fixed.as_in(job),
    )
    return found.plan
