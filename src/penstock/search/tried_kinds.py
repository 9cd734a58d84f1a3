"""Tried: what a search tried beside the plan that it chose, the best of each kind."""

from collections.abc import Iterable

from penstock.plan.plan import Plan, plan_by_hand
from penstock.plan.tried import Tried, in_words
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge

_MOST = 5  # rows beside the plan


def tried_beside(
    judge: Judge, chosen: Candidate, candidates: Iterable[Candidate], micro_batches: int
) -> tuple[Tried, ...]:
    """Return the fastest candidate of each other kind, and the step of one process.

    A kind is how many replicas there are, of how many ranks each.  One process is simulated
    where it was not tried; it is left out where it does not fit, or cannot be: several ranks divide
    the ops of the step.
    """
    kinds: dict[tuple[int, int], Candidate] = {}
    for each in candidates:
        kind = each.plan.replicas, each.plan.num_ranks
        if not each.refused and (kind not in kinds or each.step_s < kinds[kind].step_s):
            kinds[kind] = each
    kinds.pop((chosen.plan.replicas, chosen.plan.num_ranks), None)
    if chosen.plan.total_ranks > 1 and (1, 1) not in kinds and chosen.plan.tensor == 1:
        alone = judge.candidate(_alone(judge, chosen.plan, micro_batches))
        if not alone.refused:
            kinds[1, 1] = alone
    rows = sorted(kinds.values(), key=lambda each: each.step_s)
    kept = [each for each in rows[:_MOST] if each.plan.total_ranks > 1]
    kept += [each for each in rows if each.plan.total_ranks == 1]
    return tuple(map(row_of, kept))


def row_of(candidate: Candidate, more: str = "") -> Tried:
    """Return what is told of a candidate; `more` of it in words."""
    plan, peak = candidate.plan, max(candidate.peak_bytes)
    what = ", ".join([in_words(plan), *([more] if more else [])])
    return Tried(what, plan.total_ranks, candidate.step_s, peak, candidate.usd)


def _alone(judge: Judge, like: Plan, micro_batches: int) -> Plan:
    """Return the plan of one process that has all micro-batches of a step."""
    made = plan_by_hand(
        judge.graph, (), "one_f_one_b", num_micro_batches=micro_batches, clip=like.agreement.clip
    )
    return made.changed(
        buffers=like.terms.buffers,
        sums=like.agreement.sums,
        topology=like.agreement.topology,
        hosts=tuple(dict.fromkeys(like.place.hosts)),
    )
