"""Turns: how many micro-batches the ranks of one stage take, where these are on unlike devices.

A stage on several ranks (`dapple(ranks=...)`) gives its micro-batches to them in turn; to faster
ones more of each turn, about as they are faster, then one more or less while that is better.

Source:  DAPPLE, arXiv:2007.01045 (replicated stages); its micro-batches are divided evenly.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from math import lcm

from penstock.errors import ScheduleError
from penstock.plan.plan import Plan
from penstock.schedule.dapple import turns_of, words_of_turns
from penstock.schedule.recipe import Recipe, built
from penstock.search.judge import Judge
from penstock.search.shapes import Shape, has_turns

_SIMPLE = 3  # of a speed beside the slowest: thirds, halves or whole ones


def by_speed(judge: Judge, plan: Plan, shape: Shape) -> Plan:
    """Return `plan` on the hosts of `shape`, each rank of a stage with a turn by its speed.

    As it is where these are all as fast, or there are too few micro-batches.
    """
    if not has_turns(plan.schedule):
        return plan
    there = plan.changed(hosts=shape.hosts)
    speeds, made = judge.speeds(there), list[tuple[int, ...]]()
    first = 0
    for turn in _turns(plan, plan.schedule):
        own = speeds[first : first + len(turn)]
        made.append(in_turn(own) if set(turn) == {1} else turn)
        first += len(turn)
    return _with_turns(plan, plan.schedule, made) or plan


def other_turns(judge: Judge, plan: Plan) -> Iterator[Plan]:
    """Yield the plans in which one rank of a stage on unlike devices takes one more or less."""
    if not has_turns(plan.schedule):
        return
    turns, speeds = _turns(plan, plan.schedule), judge.speeds(plan)
    first = 0
    for stage, turn in enumerate(turns):
        own = speeds[first : first + len(turn)]
        first += len(turn)
        for at in range(len(turn)) if len({*own}) > 1 else ():
            for by in (1, -1):
                other = (*turn[:at], turn[at] + by, *turn[at + 1 :])
                row = (*turns[:stage], other, *turns[stage + 1 :])
                made = _with_turns(plan, plan.schedule, row) if min(other) > 0 else None
                if made is not None:
                    yield made


def _turns(plan: Plan, recipe: Recipe) -> tuple[tuple[int, ...], ...]:
    """Return the turn of each of the recipe's own stages."""
    named = turns_of(str(dict(recipe.arguments)["ranks"]))
    count = len(recipe.units) or plan.num_stages
    return named + ((1,),) * (count - len(named))


def in_turn(speeds: Sequence[float]) -> tuple[int, ...]:
    """Return small whole numbers that are about as the speeds are."""
    parts = [Fraction(speed / min(speeds)).limit_denominator(_SIMPLE) for speed in speeds]
    least = lcm(*(part.denominator for part in parts))
    return tuple(int(part * least) for part in parts)


def _with_turns(plan: Plan, recipe: Recipe, turns: Sequence[Sequence[int]]) -> Plan | None:
    """Return the plan with these turns; None where there are too few micro-batches for them."""
    rest = tuple(pair for pair in recipe.arguments if pair[0] != "ranks")
    words = words_of_turns(turns)
    value = int(words) if words.isdecimal() else words
    made = replace(recipe, arguments=(*rest, ("ranks", value)))
    try:
        for share in {*plan.grid.shares}:
            built(made, plan.num_stages, share)
    except ScheduleError:
        return None
    return replace(plan, schedule=made)
