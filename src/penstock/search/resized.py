"""Resized: the same plan with one stage cut in two, or two neighbours of a rank as one.

The unit of whatever is decided piece by piece is the stage: what is gathered in one message, kept,
copied away, computed again.  Where two neighbours are one, so are their gathers; where a stage is
two, each has its own place and its own time.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TypeVar

from penstock.graph.graph import Graph
from penstock.plan.overlap import prefetch_of
from penstock.plan.plan import Plan, divided
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.recipe import AnySchedule, Recipe, units_of

_Word = TypeVar("_Word")


def in_two(plan: Plan, graph: Graph, stage: int) -> Plan | None:
    """Return the plan with a stage cut at the point nearest to half of its weights.

    None where it cannot be cut, or ranks would take micro-batches through both parts in turn.
    """
    ends = (-1, *plan.cuts, len(graph.cut_points))
    inner = range(ends[stage] + 1, ends[stage + 1])
    if not inner or (not _by_stage(plan) and not units_of(plan.schedule)):
        return None
    point = _middle(graph, inner, ends[stage], ends[stage + 1])
    if not _by_stage(plan):
        return divided(plan, graph, [point])
    return _recut(plan, graph, (*plan.cuts[:stage], point, *plan.cuts[stage:]), stage, more=True)


def as_one(plan: Plan, graph: Graph, stage: int) -> Plan | None:
    """Return the plan with a stage and the next one as one, as the first of them is.

    None where they are not of one rank, one after the other.
    """
    if stage + 1 >= plan.num_stages:
        return None
    schedule, units = plan.schedule, units_of(plan.schedule)
    if units:
        if stage + 1 in (0, *accumulate(units)):
            return None
        home = next(at for at, end in enumerate(accumulate(units)) if stage < end)
        fewer = tuple(count - (at == home) for at, count in enumerate(units))
        assert isinstance(schedule, Recipe), "only a recipe has units"
        schedule = replace(schedule, units=() if set(fewer) == {1} else fewer)
    elif not _by_stage(plan):
        return None
    cuts = (*plan.cuts[:stage], *plan.cuts[stage + 1 :])
    return _recut(plan, graph, cuts, stage, more=False, schedule=schedule)


def _by_stage(plan: Plan) -> bool:
    """Return whether one rank takes all micro-batches through each stage, whichever these are."""
    is_it = isinstance(plan.schedule, Recipe) and plan.schedule.builder == breadth_first.__name__
    return is_it and plan.num_ranks == 1 and not units_of(plan.schedule)


def _recut(
    plan: Plan,
    graph: Graph,
    cuts: Sequence[int],
    stage: int,
    *,
    more: bool,
    schedule: AnySchedule | None = None,
) -> Plan:
    def row(words: Sequence[_Word]) -> tuple[_Word, ...]:
        again = words[stage : stage + 1] if more else ()
        return (*words[: stage + 1], *again, *words[stage + 1 + (not more) :]) if words else ()

    whole = tuple(again is True for again in plan.recompute)  # of single ops: not as they were
    return plan.changed(
        cuts=cuts,
        cut_names=tuple(graph.cut_points[cut].name for cut in cuts),
        schedule=plan.schedule if schedule is None else schedule,
        recompute=row(whole),
        offload=row(plan.offload),
        shard=row(plan.shard),
        prefetch=prefetch_of(row(plan.ahead)),
    )


def _middle(graph: Graph, inner: range, first: int, end: int) -> int:
    """Return the cut point that divides what forward passes read of weights most evenly."""
    low = graph.cut_points[first].at if first >= 0 else 0
    high = graph.cut_points[end].at if end < len(graph.cut_points) else len(graph.nodes)
    held, total, seen = list[int](), 0, set[int]()  # of each node, what those before it read
    for own in graph.nodes[low:high]:
        held.append(total)
        if own.kind == "op" and own.phase == "F":
            new = {i for i in own.inputs if graph.nodes[i].kind == "parameter"} - seen
            total += sum(graph.nodes[i].size_bytes for i in new)
            seen |= new
    return min(inner, key=lambda point: abs(held[graph.cut_points[point].at - low] - total / 2))
