"""Simplest: of plans predicted to differ by less than the prediction error, the simplest.

One more message or stage is one more thing that a prediction can miss: waiting for a core, for a
link, for a peer that comes late.  So a plan has to be predicted faster by more than the usual error
of a prediction before it is preferred to one with fewer messages and stages.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from penstock.bits import AS_IT_IS
from penstock.graph.wire import wire_choices
from penstock.plan.plan import Decision, Plan
from penstock.schedule.orders import F
from penstock.schedule.recipe import copied_of, is_woven, name_of
from penstock.search.candidate import Candidate, Objective
from penstock.search.judge import Judge
from penstock.search.moves import does_without
from penstock.units import format_seconds

ERROR = 0.05  # of a predicted step: the median over 120 plans of four models (docs/figures.md)


def simplest(
    judge: Judge, best: Candidate, others: Sequence[Candidate], objective: Objective, error: float
) -> Candidate:
    """Return the simplest of the usable candidates whose score is within `error` of the best.

    That is the one with fewest messages a step, then fewest stages, then whose stages do without
    nothing, then without copies or collects beside computes, which need more memory, then the best
    score.
    """
    if objective == "memory" or error == 0:
        return best
    limit = best.score(objective)[0] * (1 + error)
    close = [each for each in others if not each.refused and each.score(objective)[0] <= limit]
    rows = [
        (*_size(judge, each.plan), *_beyond(each.plan), each.score(objective), at, each)
        for at, each in enumerate([best, *close])
    ]
    found = min(rows, key=lambda row: row[:7])
    return best if found[:5] == rows[0][:5] else found[-1]


def exactest(
    judge: Judge, chosen: Candidate, fewest: tuple[int, int], objective: Objective, limit: float
) -> Candidate:
    """Return `chosen` with as many bits a number in its messages as leave its score within `limit`.

    fewest:   bits that the job allows, there and back.
    Of those with the most bits there and back together, the best.
    """
    if not chosen.plan.terms.rounds:
        return chosen
    there, back = (dict.fromkeys((*wire_choices((least, least)), AS_IT_IS)) for least in fewest)
    pairs = sorted(itertools.product(there, back), key=sum, reverse=True)
    for _, row in itertools.groupby(pairs, key=sum):
        found = [judge.candidate(chosen.plan.changed(wire=wire)) for wire in row]
        fits = [each for each in found if not each.refused and each.score(objective)[0] <= limit]
        if fits:
            return min(fits, key=lambda each: each.score(objective))
    return chosen


def why_simplest(judge: Judge, chosen: Candidate, best: Candidate) -> Decision:
    """Return the decision for `chosen` instead of `best`, which is predicted to be faster."""
    (own, _), (theirs, stages) = _size(judge, chosen.plan), _size(judge, best.plan)
    other = f"{best.plan.replicas} x {stages} stages, {name_of(best.plan.schedule)}"
    other += ", copies beside computes" if _copies(best.plan) > _copies(chosen.plan) else ""
    woven = is_woven(best.plan.schedule) and not is_woven(chosen.plan.schedule)
    other += ", collects beside computes" if woven else ""
    other += ", of which some are divided, far or repeated" * (
        does_without(best.plan) and not does_without(chosen.plan)
    )
    why = (
        f"{other}, is predicted at {format_seconds(best.step_s)} with {theirs:,} messages a step; "
    )
    why += f"{chosen.step_s / best.step_s - 1:.1%} is less than the prediction error"
    return Decision("simplest", f"{own:,} messages a step", "search", why)


def _beyond(plan: Plan) -> tuple[bool, bool, bool]:
    """Return whether stages do without something, and whether copies, or collects, run beside
    computes.
    """
    return does_without(plan), _copies(plan), is_woven(plan.schedule)


def _copies(plan: Plan) -> bool:
    return plan.overlap.beside or bool(copied_of(plan.schedule))


def _size(judge: Judge, plan: Plan) -> tuple[int, int]:
    """Return the messages of a step over a chain of the plan's stages, and its stages."""
    plan = judge.suited(plan)
    return 2 * sum(_sent(judge, plan, share) for share in plan.grid.shares), plan.num_stages


def _sent(judge: Judge, plan: Plan, share: int) -> int:
    """Return the messages forward of a replica that takes `share` micro-batches."""
    orders = judge.schedule(plan, share=share).orders
    forward = orders.kinds == F
    ranks = np.repeat(np.arange(len(orders.offsets) - 1), np.diff(orders.offsets))[forward]
    where = np.full((plan.num_stages, int(orders.micro_batches.max()) + 1), -1)
    where[orders.stages[forward], orders.micro_batches[forward]] = ranks
    return int((where[1:] != where[:-1]).sum())
