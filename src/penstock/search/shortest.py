"""Shortest: the shortest step for given seconds and memory: of the built-in schedules, or found.

`built_in` takes the existing schedules, `exact` (schedule/exact.py) solves for one stage on
each rank, `anneal` moves actions in any schedules that drain, and keeps their placement.
"""

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Builder
from penstock.schedule.anneal import annealed
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Seconds, least_step_s
from penstock.schedule.orders import KINDS
from penstock.schedule.schedule import Schedule
from penstock.simulate.many_candidates import step_seconds
from penstock.simulate.wait_table import table_of

_MOVES, _ACTIONS = 200_000, 40_000_000  # in a round at most: moves, and actions looked at
_FEWEST_MOVES = 200


class Requirements(NamedTuple):
    """What a schedule is to be found for; `limit` is the activations that a rank may hold."""

    num_stages: int
    num_micro_batches: int
    num_ranks: int
    limit: int
    seconds: Seconds


class Timed(NamedTuple):
    schedule: Schedule
    step_s: float


def timed(schedule: Schedule, seconds: Seconds) -> Timed:
    """Return a schedule of one step with what the step takes; its messages share no link."""
    forward_s, input_s, weights_s = seconds.table(schedule.num_stages, split=True)
    both_s, weights_s = (schedule.together * each for each in (input_s + weights_s, weights_s))
    by_kind = {"F": forward_s, "B": both_s, "I": input_s, "W": weights_s}
    rows = [by_kind.get(kind, np.zeros_like(forward_s)) for kind in KINDS]
    found = step_seconds(table_of(schedule), np.array([rows]), np.array([seconds.message_s]))
    return Timed(schedule, float(found[0]))


def least_s(schedule: Schedule, seconds: Seconds) -> float:
    """Return the lower bound for its stages on these ranks: work, and its start."""
    table = seconds.table(schedule.num_stages, split=True)
    return least_step_s(schedule.ranks.astype(np.int64), table, seconds.message_s)


def built_in(given: Requirements) -> list[Timed]:
    """Return the built-in schedules that drain and suit what is given, the shortest step first.

    Each stage lives on one rank.  Those that take seconds and a limit are made for them.
    """
    made = (_built(builder, given) for builder in SCHEDULES)
    known = [timed(schedule, given.seconds) for schedule in made if schedule is not None]
    return sorted(known, key=lambda each: each.step_s)


def _built(builder: Builder, given: Requirements) -> Schedule | None:
    takes = inspect.signature(builder).parameters
    wished: dict[str, object] = {
        "num_ranks": given.num_ranks,
        "seconds": given.seconds,
        "limit": given.limit,
    }
    extra = {name: value for name, value in wished.items() if name in takes}
    try:
        made = builder(given.num_stages, given.num_micro_batches, **extra)
    except ScheduleError:  # not of these sizes
        return None
    trains = bool((made.orders.kinds != KINDS.index("F")).any())
    drains = trains and made.num_steps == 1 and not made.has_updates
    suits = made.num_ranks == given.num_ranks and all(len(ranks) == 1 for ranks in made.stage_ranks)
    return made if drains and suits and max(peak_activations(made)) <= given.limit else None


def anneal(starts: Sequence[Schedule], given: Requirements, is_over: Callable[[], bool]) -> Timed:
    """Return the shortest that annealing finds from `starts`, in turn, until `is_over`.

    One round from each is made in any case, and none after one that cannot be beaten.

    Raises:   ScheduleError: no start, or one that does not drain or holds more than the limit.
    """
    if not starts:
        message = f"no built-in schedule holds at most {given.limit} activations on a rank"
        raise ScheduleError(message, hint="raise the limit, or name a schedule to begin with")
    num_actions = 3 * given.num_stages * given.num_micro_batches
    moves = max(_FEWEST_MOVES, min(_MOVES, _ACTIONS // num_actions))
    best = timed(starts[0], given.seconds)
    for seed in itertools.count():
        start = starts[seed % len(starts)]
        made = annealed(start, seconds=given.seconds, limit=given.limit, moves=moves, seed=seed)
        best = min(best, timed(made, given.seconds), key=lambda each: each.step_s)
        is_least = best.step_s <= least_s(best.schedule, given.seconds) * (1 + 1e-12)
        if is_least or (seed + 1 >= len(starts) and is_over()):
            break
    return best
