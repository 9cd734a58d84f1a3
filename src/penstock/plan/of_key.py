"""Of key: a plan for the step of another shape, with the same division of the model.

The graphs of one model for two shapes have the same ops in the same order, as a rule: then cut
points and ops to repeat are the same nodes.  Where they are not, cuts are found by their names.
"""

from dataclasses import replace

from penstock.errors import UnlikeCutsError
from penstock.graph.cut_points import points_at
from penstock.graph.graph import Graph, Node, with_cut_points
from penstock.plan.plan import Plan
from penstock.plan.stage import StagePlan

_HINT = "plan it as one stage: stages=1"


def for_key(plan: Plan, first: Graph, graph: Graph) -> tuple[Plan, Graph]:
    """Return the plan and the graph of a step of another shape.

    first:    the graph that `plan` is for.
    Raises:   UnlikeCutsError: the graph has no such places to cut, or no such ops to repeat.
    """
    if is_alike(first, graph):
        graph = with_cut_points(graph, points_at(graph, first.cut_points))
        return replace(plan, graph=graph.digest, predicted=None), graph
    places = {point.name: at for at, point in enumerate(graph.cut_points)}
    stages: list[StagePlan] = []
    for stage in plan.stages:
        if not isinstance(stage.recompute, bool):
            message = (
                "a stage repeats some ops, and the step of another shape or turn has other ops"
            )
            raise UnlikeCutsError(message, hint=_HINT)
        if stage.cut is not None and stage.name not in places:
            message = f"the step of another shape or turn cannot be cut at {stage.name!r}"
            raise UnlikeCutsError(message, hint=_HINT)
        stages.append(stage if stage.cut is None else replace(stage, cut=places[stage.name]))
    made = replace(plan, graph=graph.digest, stages=tuple(stages), predicted=None)
    return made, graph


def is_alike(first: Graph, graph: Graph) -> bool:
    """Return whether two graphs have the same nodes, but for their sizes."""
    pairs = zip(first.nodes, graph.nodes, strict=False)
    return len(first.nodes) == len(graph.nodes) and all(_said(a) == _said(b) for a, b in pairs)


def _said(node: Node) -> tuple[object, ...]:
    name = "" if node.kind == "op" else node.name
    return node.kind, name, node.target, node.phase, node.inputs
