"""Units: where stages of replicas are cut again, so that sums run beside the backward pass.

The gradients of a unit are one bucket: they are summed as soon as the last of them is there, in one
call.  Few units mean few calls, of computes too, and a long last sum that nothing hides; many mean
the opposite.  The best of four usual settings is changed, one cut at a time, as long as that makes
the simulated step shorter: units are joined, or split.

    whole          each stage one unit: its gradients are summed at its end
    block          one of each block of the model
    25 MB          as DDP: cut where so many bytes of gradients have come together, from the end
    each           cut wherever the model can be cut

Source: joint fusion of ops and of tensors, DisCo, arXiv:2209.12769; DDP, arXiv:2006.15704.
"""

import bisect
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.graph.cut_points import block_ends
from penstock.graph.graph import Graph
from penstock.plan.plan import Plan, divided
from penstock.rules.rewrite import made_to_keep
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge

BUCKET_BYTES = 25 * 2**20
_MOST_POINTS = 64  # of models that can be cut at more, the setting `each` is not looked at
_MOST_TRIED = 120  # plans, and fewer where they are large: so many actions in all
_MOST_ACTIONS = 100_000
_CLEARLY = 1e-3  # of a step: what a change has to gain


class InUnits(NamedTuple):
    """The best units of a plan, and the seconds of a step with each of the usual settings.

    setting:   the name of that which it is; "searched": of none.
    """

    candidate: Candidate
    setting: str
    usual_s: dict[str, float]


def in_best_units(judge: Judge, plan: Plan) -> InUnits | None:
    """Return the plan in the units with the shortest simulated step; None where none is possible.

    A plan that breaks rules is changed so that it keeps them; one that does not fit the memory
    counts for nothing.
    """
    made, all_points = dict[tuple[int, ...], Candidate](), range(len(judge.graph.cut_points))
    actions = len(all_points) * plan.num_micro_batches * plan.total_ranks
    most = min(_MOST_TRIED, _MOST_ACTIONS // max(1, actions))
    usual = settings(judge.graph, plan)
    for points in usual.values():
        _add(made, judge, plan, points)
    fits = {name: made[points] for name, points in usual.items() if points in made}
    if not fits:
        return None
    setting = min(fits, key=lambda each: fits[each].step_s)
    best, points, before = fits[setting], usual[setting], None
    while points != before:
        before = points
        for point in all_points:
            if len(made) >= most:
                break
            other = tuple(sorted({*points} ^ {point}))
            if point in plan.cuts or other in made:
                continue
            _add(made, judge, plan, other)
            if other in made and made[other].step_s < (1 - _CLEARLY) * best.step_s:
                best, points, setting = made[other], other, "searched"
    return InUnits(best, setting, {name: each.step_s for name, each in fits.items()})


def settings(graph: Graph, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return the usual settings of units: by name, the cut points inside the stages of `plan`."""
    free = [point for point in range(len(graph.cut_points)) if point not in plan.cuts]
    blocks = set(block_ends(graph))
    found = {
        "whole": (),
        "block": tuple(point for point in free if point in blocks),
        "25 MB": tuple(sorted(point for point in _buckets(graph) if point in free)),
    }
    return found | ({"each": tuple(free)} if len(free) <= _MOST_POINTS else {})


def _add(
    made: dict[tuple[int, ...], Candidate], judge: Judge, plan: Plan, points: tuple[int, ...]
) -> None:
    """Put the plan cut at `points` too among those made, if rules and memory allow it."""
    try:
        cut = made_to_keep(divided(plan, judge.graph, points), judge.graph, judge.rules)
    except PlanError:
        return
    candidate = judge.candidate(replace(cut, predicted=None))
    if not candidate.refused:
        made[points] = candidate


def _buckets(graph: Graph) -> Iterator[int]:
    """Yield the cut points at which DDP's buckets would begin, the last one first."""
    first: dict[int, int] = {}  # by node, the op that reads it first
    for at, node in enumerate(graph.nodes):
        for read in node.inputs:
            first.setdefault(read, at)
    sizes, places = [0] * (len(graph.cut_points) + 1), [point.at for point in graph.cut_points]
    for number, node in enumerate(graph.nodes):
        if node.kind == "parameter" and node.name in graph.gradients and number in first:
            sizes[bisect.bisect_right(places, first[number])] += graph.kept_bytes(number)
    held = 0
    for point in reversed(range(len(places))):
        held += sizes[point + 1]
        if held >= BUCKET_BYTES:
            yield point
            held = 0
