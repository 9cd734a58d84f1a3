"""Shifted: plans that differ only in who takes which micro-batches; no state moves between them.

Replicas have other shares, ranks of one stage other turns.  What a rank holds stays as it is, so a
run can go from one to the other between any two steps.

Straight to what is best, and not by one micro-batch after the other: each change costs the same,
and each step on the way is longer than one at the end (bench/straggler.py --walk).  A rank whose
slowness was guessed wrong is corrected by the next change.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

from penstock.plan.lower_plan import lower_plan
from penstock.plan.plan import Plan, is_asynchronous
from penstock.program.program import Program
from penstock.schedule.grid import evenly, unlike
from penstock.schedule.recipe import has_window
from penstock.schedule.schedule import Schedule
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge
from penstock.search.turns import other_turns


def shifted(
    judge: Judge, plan: Plan, *, is_over: Callable[[], bool] = lambda: False
) -> Candidate | None:
    """Return the fastest plan that only shares micro-batches otherwise; None where none is faster.

    From shares as they are, even ones and such by speed, by single moves while these make it
    faster.
    """
    if is_asynchronous(plan) or plan.terms.buffers == "per replica":
        return None
    own = judge.candidate(plan, as_said=True)
    best, program = own, lower_plan(plan, judge.graph)
    for start in _starts(judge, plan):
        found = _descended(judge, start, is_over)
        if found.step_s < best.step_s and not found.refused:
            made = lower_plan(found.plan, judge.graph)
            best = found if keeps_state(program, made) else best
    return best if best.step_s < own.step_s else None


def keeps_state(before: Program, after: Program) -> bool:
    """Return whether ranks can go from one program to the other as they are.

    They hold the same, and sum in the same groups.
    """
    held = "sharded", "parts", "far", "together", "num_ranks"
    if any(getattr(before, name) != getattr(after, name) for name in held):
        return False
    if (before.graph.bits, before.end.guard) != (after.graph.bits, after.end.guard):
        return False
    old, new = ({each.ranks for each in program.code.reductions} for program in (before, after))
    ranks = range(before.num_ranks)
    return new <= old and all(before.stages_of(rank) == after.stages_of(rank) for rank in ranks)


def _starts(judge: Judge, plan: Plan) -> Iterator[Plan]:
    yield plan
    if plan.step_micro_batches < plan.replicas or plan.replicas == 1 or not _is_free(plan):
        return
    grid, places = plan.grid, judge.places(plan.place.hosts, plan.total_ranks)
    took = [judge.profiles[place].micro_batch_s for place in places]
    own = [1 / max(took[rank] for rank in grid.ranks_of(r)) for r in range(grid.replicas)]
    even = evenly(plan.step_micro_batches, plan.replicas)
    for shares in dict.fromkeys((even, by_speed(plan.step_micro_batches, own))):
        if shares != grid.shares:
            yield _with(plan, shares)


def by_speed(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Return shares of which the one that takes longest is shortest: one each, the rest in turn to
    whoever would be done first.
    """
    shares = [1] * len(speeds)
    ends = [(2 / speed, at) for at, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(total - len(speeds)):
        _, at = ends[0]
        shares[at] += 1
        heapq.heapreplace(ends, ((shares[at] + 1) / speeds[at], at))
    return tuple(shares)


def _with(plan: Plan, shares: tuple[int, ...]) -> Plan:
    return plan.changed(shares=unlike(shares), num_micro_batches=max(shares))


def _is_free(plan: Plan) -> bool:
    """Return whether the replicas may have unlike shares."""
    is_listed = isinstance(plan.schedule, Schedule) or has_window(plan.schedule)
    return not is_listed and not plan.averages


def _other_shares(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """Yield plans in which one replica gives a micro-batch to another; of like pairs one."""
    if plan.replicas == 1 or not _is_free(plan):
        return
    grid, places = plan.grid, judge.places(plan.place.hosts, plan.total_ranks)
    like: dict[object, int] = {}
    for replica in range(grid.replicas):
        kinds = tuple(places[rank] for rank in grid.ranks_of(replica))
        like.setdefault((kinds, grid.shares[replica]), replica)
    for giver, taker in itertools.permutations(like.values(), 2):
        shares = [*grid.shares]
        shares[giver], shares[taker] = shares[giver] - 1, shares[taker] + 1
        if shares[giver]:
            yield _with(plan, tuple(shares))


def _descended(judge: Judge, start: Plan, is_over: Callable[[], bool]) -> Candidate:
    best = judge.candidate(start, as_said=True)
    while not is_over():
        others = (*_other_shares(judge, best.plan), *other_turns(judge, best.plan))
        found = (judge.candidate(each, as_said=True) for each in others)
        next_best = min(found, key=lambda one: (bool(one.refused), one.step_s), default=best)
        if next_best.refused or next_best.step_s >= best.step_s:
            break
        best = next_best
    return best
