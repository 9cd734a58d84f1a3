"""Crossing: what a plan sends between regions, and what stays inside them."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from penstock.cluster.cluster import Cluster
from penstock.cluster.regions import Floats, Groups, capability_of, regions
from penstock.plan.lower_plan import lower_plan
from penstock.plan.plan import Decision, Plan
from penstock.program.codes import SEND
from penstock.program.program import Program
from penstock.search.judge import Judge
from penstock.units import format_bytes


def crossing(judge: Judge, plan: Plan) -> Iterator[Decision]:
    """Yield which ranks are in which region, and what crosses; nothing where all are in one.

    Regions are those that the links between the hosts tell of (cluster/regions.py).
    """
    cluster = judge.cluster_of(plan.place.hosts)
    apart = capability_of(cluster)
    groups = regions(apart)
    if len(groups) == 1:
        return
    program = lower_plan(plan, judge.graph, schedule=judge.schedule(plan))
    region = _region_of_ranks(cluster, groups, plan.total_ranks)
    value = "; ".join(_words(cluster, group, plan.total_ranks) for group in groups)
    why = f"a byte takes {_times(apart, groups):.3g} times as long between them"
    yield Decision("regions", value, "search", f"{why}: {_crosses(program, plan, region)}")


def _region_of_ranks(cluster: Cluster, groups: Groups, num_ranks: int) -> list[int]:
    of = {host: number for number, group in enumerate(groups) for host in group}
    return [of[cluster.host_number(rank)] for rank in range(num_ranks)]


def _words(cluster: Cluster, group: Sequence[int], num_ranks: int) -> str:
    names = ", ".join(cluster.hosts[host].name for host in group)
    own = [rank for rank in range(num_ranks) if cluster.host_number(rank) in group]
    if not own:
        return f"{names} (idle)"
    is_row = own == list(range(own[0], own[-1] + 1))
    listed = f"{own[0]}-{own[-1]}" if is_row and len(own) > 1 else ", ".join(map(str, own))
    return f"{names} (rank{'s' if len(own) > 1 else ''} {listed})"


def _times(apart: Floats, groups: Groups) -> float:
    """Return how many times as long a byte takes between regions, by the medians."""
    of = {host: number for number, group in enumerate(groups) for host in group}
    inside, across = list[float](), list[float]()
    for a, b in combinations(sorted(of), 2):
        (inside if of[a] == of[b] else across).append(max(apart[a, b], apart[b, a]))
    return float(np.median(across) / np.median(inside))


def _crosses(program: Program, plan: Plan, region: Sequence[int]) -> str:
    """Return what a step of `program` sends from region to region."""
    code, of = program.code, np.array(region)
    ranks = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    sends = np.flatnonzero(code.op == SEND)
    crossing_edges: list[int] = code.edge[sends[of[ranks[sends]] != of[code.peer[sends]]]].tolist()
    edges = [program.edges[edge] for edge in crossing_edges]
    size = sum(edge.size_bytes for edge in edges)
    after = sorted({min(edge.source, edge.target) for edge in edges})
    words = f"messages of {format_bytes(size)} a step cross" if edges else "no message crosses"
    if edges and plan.cuts and len(after) < 4:
        words += f", {', '.join(plan.cut_names[at] for at in after if at < len(plan.cut_names))}"
    sums = [each for each in code.reductions if len({region[rank] for rank in each.ranks}) > 1]
    summed = format_bytes(sum(each.size_bytes for each in sums))
    return f"{words}; {f'sums of {summed} do' if sums else 'no sum does'}"
