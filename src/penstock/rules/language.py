"""Language: the schedule language, one pure function on plans for each thing that a rule can say.

    plan = cut(plan, graph, "blocks.3")
    plan = recompute(plan, graph, "blocks.*")
    plan = offload(plan, graph, "blocks.[0-3]", "state")
    plan = shard(plan, graph, "embedding")
    plan = fuse(plan, graph, "blocks.[0-3]")
    graph = split(graph, "head", 4)

A pattern is of module paths (rule.py).  What cannot be is refused; what was decided stands in the
plan, by the user.
Source:  Slapo, arXiv:2302.08005: schedule apart from model, by primitives on modules.
"""

from penstock.errors import GraphError
from penstock.graph.graph import Graph
from penstock.graph.traced_graph import Traced, captured_as
from penstock.plan.plan import Plan
from penstock.program.passes.offload import Offloaded
from penstock.rules.rewrite import rewritten
from penstock.rules.rule import Rule
from penstock.rules.ruled import slices_asked


def cut(plan: Plan, graph: Graph, pattern: str) -> Plan:
    """Return `plan` cut behind the modules that `pattern` matches, or at cut points so named.

    A stage that is cut there becomes units on its rank.
    Raises:   PlanError: no such module, or its end is no cut point.
    """
    return rewritten(plan, graph, [Rule("cut", pattern)])


def fuse(plan: Plan, graph: Graph, pattern: str) -> Plan:
    """Return `plan` with the units that are inside these modules joined to one.

    Raises:   PlanError: no such module; it is cut between stages of the schedule itself.
    """
    return rewritten(plan, graph, [Rule("fuse", pattern)])


def recompute(plan: Plan, graph: Graph, pattern: str, *, on: bool = True) -> Plan:
    """Return `plan` in which the backward pass of these modules repeats F, or does not.

    Raises:   PlanError: no such module, or one that no cut point divides from others.
    """
    return rewritten(plan, graph, [Rule("recompute", pattern, "yes" if on else "no")])


def offload(plan: Plan, graph: Graph, pattern: str, what: Offloaded = "both") -> Plan:
    """Return `plan` with `what` of these modules in far memory while it is not needed.

    Raises:   as `recompute`.
    """
    return rewritten(plan, graph, [Rule("offload", pattern, what)])


def shard(plan: Plan, graph: Graph, pattern: str) -> Plan:
    """Return `plan` with the weights of these modules divided among replicas, whole while used.

    Raises:   PlanError: no such module with weights; a plan of one replica, or that reads older
              weights.
    """
    return rewritten(plan, graph, [Rule("shard", pattern)])


def keep(plan: Plan, graph: Graph, pattern: str) -> Plan:
    """Return `plan` with these weights divided, and whole from their first use to their last.

    Raises:   as `shard`.
    """
    return rewritten(plan, graph, [Rule("keep", pattern)])


def replicate(plan: Plan, graph: Graph, pattern: str) -> Plan:
    """Return `plan` with these weights whole on every replica.

    Raises:   PlanError: no such module with weights.
    """
    return rewritten(plan, graph, [Rule("replicate", pattern)])


def split(graph: Graph, pattern: str, into: int = 2) -> Traced:
    """Return the graph with the weights of these modules cut along their rows, into so many slices.

    It is another step, for which plans are made anew (docs/rules.md).
    Raises:   PlanError: no such module with weights.
              GraphError: an op reads one whole; it has too few rows; a graph that was not traced
              here, or has slices already.
    """
    from penstock.graph.split import split as split_step

    if not isinstance(graph, Traced):
        raise GraphError(f"graph {graph.digest} was not traced here", hint="trace the job again")
    wanted = slices_asked([Rule("split", pattern, str(into))], graph)
    return captured_as(split_step(graph.capture, wanted), graph.job)


LANGUAGE = (cut, fuse, recompute, offload, shard, keep, replicate)
