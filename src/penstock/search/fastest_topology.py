"""Topology: along whose rounds the sums of a plan go, where the user asks for the fastest.

Where a transport sums by itself and the clock says that no other way is faster, it goes on so.
"""

from penstock.graph.graph import Graph
from penstock.plan.plan import Plan
from penstock.routes import FASTEST
from penstock.search.judge import Judge

_ANY = "tree", "halving", "doubling", "direct", "ring"
_WORTH = 0.95  # of the seconds of a transport's own sum: what is predicted differs by as much


def with_topology(judge: Judge, plan: Plan, asked: str | None) -> Plan:
    """Return the plan with the topology that is asked for; None: as it is.

    Of the fastest: by the sum of a stage as large as the mean of all, over the replicas.
    Raises:   PlanError: there is none such, or the plan cannot have it.
    """
    if asked != FASTEST or plan.replicas == 1:
        return plan if asked in (None, FASTEST) else plan.changed(topology=asked)
    cluster, grid = judge.cluster_of(plan.place.hosts), plan.grid
    ranks = [grid.ranks_of(replica)[0] for replica in range(plan.replicas)]
    hosts = [cluster.host_number(rank) for rank in ranks]
    near = min(hosts.count(host) for host in set(hosts))
    words = [*_ANY, *([f"hierarchical:{near}"] if 1 < near < len(ranks) else [])]
    size_bytes = _mean_bytes(judge.graph, plan)
    timed = {word: cluster.sum_s(size_bytes, ranks, word) for word in words}
    least = min(words, key=lambda word: timed[word])
    own_s = cluster.sum_s(size_bytes, ranks)
    return plan.changed(topology=least) if timed[least] < _WORTH * own_s else plan


def _mean_bytes(graph: Graph, plan: Plan) -> float:
    places = [at for at, node in enumerate(graph.nodes) if node.kind == "parameter"]
    return sum(map(graph.kept_bytes, places)) / plan.num_stages
