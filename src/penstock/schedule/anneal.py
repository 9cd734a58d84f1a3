"""Anneal: move actions about in the orders of their ranks, while no rank holds more than before.

A move takes an action a few places forward or back on its rank.  One that does not lengthen the
step is kept; one that does is kept now and then, less and less often.  What comes out is as short
as the schedule that went in, or shorter: ZB-V on six ranks with six micro-batches, 59 seconds long
if every action and every message takes one, becomes 47 seconds long with the same activations.

Source: S. Kirkpatrick et al., "Optimization by simulated annealing", 1983.
"""

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.clock import Clockwork, Log, Numbers, clockwork, log_of, numbers_of, run
from penstock.schedule.compiled import kept, random_numbers_kept
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import B, F, I, IntArray, Orders, W
from penstock.schedule.schedule import Schedule

Bools: TypeAlias = npt.NDArray[np.bool_]

_REACH = 6  # the most places that an action is moved
_HEAT = 0.6  # of the shortest action: how much the step may grow at first


def annealed(
    schedule: Schedule,
    *,
    seconds: Seconds | None = None,
    limit: int | None = None,
    moves: int = 200_000,
    seed: int = 0,
) -> Schedule:
    """Return a schedule of the same actions on the same ranks that takes no longer.

    No rank holds more than `limit` activations, by default the most that one holds in `schedule`.
    `seconds` are by default f = i = w = 1.  100,000 moves of 200 actions take about a second.

    Ignores:  memory of stages of unequal size.
    Raises:   ScheduleError: a schedule of several steps, or one that holds more than `limit`.
    """
    held = max(peak_activations(schedule))
    most = held if limit is None else limit
    if schedule.has_updates or schedule.num_steps > 1:
        hint = "anneal a schedule that drains"
        raise ScheduleError(f"{schedule.name or 'it'} is of several steps", hint=hint)
    if held > most:
        raise ScheduleError(f"a rank holds {held} activations of {most}", hint="raise the limit")
    if schedule.together > 1:
        hint = "anneal a schedule with backwards of one micro-batch each"
        message = f"{schedule.name or 'it'} has backwards of {schedule.together} together"
        raise ScheduleError(message, hint=hint)
    orders, table = schedule.orders, (seconds or Seconds()).table(schedule.num_stages, split=True)
    shape = (schedule.num_stages, schedule.num_micro_batches)
    cells = orders.stages * shape[1] + orders.micro_batches
    whole = np.zeros(shape[0] * shape[1], np.bool_)
    whole[cells[orders.kinds == B]] = True
    took_s = np.repeat(table, shape[1], axis=1)
    took_s[1, whole] += took_s[2, whole]
    message_s = float(seconds.message_s) if seconds else 0.0
    work = clockwork(schedule.ranks, took_s.ravel(), message_s)
    actions = numbers_of(orders, shape)
    log = log_of(2 * work.homes.size)
    with random_numbers_kept():
        best = _anneal(actions, orders.offsets, (work, log, whole), (most, moves, seed))
    kinds, stages, numbers = np.unravel_index(best, (3, *shape))
    codes = np.array([F, I, W], np.uint8)[kinds]
    codes[(kinds == 1) & whole[best % len(whole)]] = B
    made = Orders(codes, stages.astype(np.int32), numbers.astype(np.int32), orders.offsets)
    return replace(schedule, orders=made, name=annealed.__name__)


@kept
def _anneal(
    actions: Numbers,
    offsets: IntArray,
    given: tuple[Clockwork, Log, Bools],
    settings: tuple[int, int, int],
) -> Numbers:
    """Return the best order found of all actions, rank after rank as in `actions`.

    `whole` says of [stage * M + micro-batch] whether its backward is B, not I and W.
    """
    limit, moves, seed = settings
    np.random.seed(seed)  # as machine code numba's own generator: for this loop alone
    work, log, whole = given
    now = actions.copy()
    now_s = _step_s(now, offsets, work, log) if _fits(now, offsets, whole, limit) else np.inf
    best, best_s, heat = now.copy(), now_s, _HEAT * work.took_s.max()
    for move in range(moves):
        place = np.random.randint(len(now))
        rank = np.searchsorted(offsets, place, side="right") - 1
        other = place + np.random.randint(-_REACH, _REACH + 1)
        if other == place or other < offsets[rank] or other >= offsets[rank + 1]:
            continue
        _shift(now, place, other)
        step_s = np.inf
        if _fits(now, offsets, whole, limit):
            step_s = _step_s(now, offsets, work, log)
        warmth = heat * (1.0 - move / moves) + 1e-9
        if step_s <= now_s or np.random.random() < np.exp((now_s - step_s) / warmth):
            now_s = step_s
            if now_s < best_s * (1 - 1e-12):
                best, best_s = now.copy(), now_s
        else:
            _shift(now, other, place)
    return best


@kept
def _shift(actions: Numbers, place: int, other: int) -> None:
    """Move the action at `place` to `other`; those between move up."""
    action = actions[place]
    step = 1 if other > place else -1
    for at in range(place, other, step):
        actions[at] = actions[at + step]
    actions[other] = action


@kept
def _step_s(actions: Numbers, offsets: IntArray, work: Clockwork, log: Log) -> float:
    """Return the step, infinity if it never ends."""
    at, clock_s = run(actions, offsets, work, log)
    for rank in range(len(at)):
        if at[rank] < offsets[rank + 1]:
            return np.inf
    return float(clock_s.max())


@kept
def _fits(actions: Numbers, offsets: IntArray, whole: Bools, limit: int) -> bool:
    """Return whether no rank holds more than `limit` activations."""
    for rank in range(len(offsets) - 1):
        held = 0
        for place in range(offsets[rank], offsets[rank + 1]):
            kind, cell = actions[place] // len(whole), actions[place] % len(whole)
            held += 1 if kind == 0 else -1 if kind == 2 or whole[cell] else 0
            if held > limit:
                return False
    return True
