"""Anneal: move actions about in the orders of their ranks, while no rank holds more than before.

A move takes an action a few places forward or back on its rank.  One that does not lengthen the
step is kept; one that does is kept now and then, less and less often.  What comes out is as short
as the schedule that went in, or shorter: V-Half on four ranks with eight micro-batches, 55 seconds
long if every action takes one, becomes 53 seconds long with the same activations.

Source: S. Kirkpatrick et al., "Optimization by simulated annealing", 1983.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ScheduleError
from penstock.schedule.compiled import compiled
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Floats, Seconds
from penstock.schedule.orders import B, F, I, IntArray, Orders, W
from penstock.schedule.schedule import Schedule

_REACH = 6  # places that an action is moved at most
_HEAT = 0.6  # of the shortest action: by so much the step may grow at first


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
    orders, table = schedule.orders, (seconds or Seconds()).table(schedule.num_stages, split=True)
    shape = (schedule.num_stages, schedule.num_micro_batches)
    rows = np.array([0, 1, 1, 2, 0])[orders.kinds]
    cells = orders.stages * shape[1] + orders.micro_batches
    whole = np.zeros(shape[0] * shape[1], np.bool_)
    whole[cells[orders.kinds == B]] = True
    took_s = np.repeat(table, shape[1], axis=1)
    took_s[1, whole] += took_s[2, whole]
    message_s = float(seconds.message_s) if seconds else 0.0
    work = _ActionTimes(took_s.ravel(), whole, schedule.ranks.astype(np.int64), message_s)
    actions = (rows * len(whole) + cells).astype(np.int64)
    best = _anneal(actions, orders.offsets, work, (most, moves, seed))
    kinds, stages, numbers = np.unravel_index(best, (3, *shape))
    codes = np.array([F, I, W], np.uint8)[kinds]
    codes[(kinds == 1) & whole[best % len(whole)]] = B
    made = Orders(codes, stages.astype(np.int32), numbers.astype(np.int32), orders.offsets)
    return replace(schedule, orders=made, name=annealed.__name__)


class _ActionTimes(NamedTuple):
    """Actions by number, (kind * S + stage) * M + micro-batch; I and B are of one kind."""

    took_s: Floats
    whole: npt.NDArray[np.bool_]  # [stage * M + micro-batch]: its backward is B, not I and W
    homes: IntArray  # the rank of [stage, micro-batch]
    message_s: float


@compiled
def _anneal(
    actions: IntArray,
    offsets: IntArray,
    work: _ActionTimes,
    settings: tuple[int, int, int],
) -> IntArray:
    """Return the best order of all actions met, rank after rank as in `actions`."""
    limit, moves, seed = settings
    np.random.seed(seed)  # numba's own generator: of this loop alone
    now = actions.copy()
    now_s = _step_s(now, offsets, work, limit)
    best, best_s, heat = now.copy(), now_s, _HEAT * work.took_s.max()
    for move in range(moves):
        place = np.random.randint(len(now))
        rank = np.searchsorted(offsets, place, side="right") - 1
        other = place + np.random.randint(-_REACH, _REACH + 1)
        if other == place or other < offsets[rank] or other >= offsets[rank + 1]:
            continue
        _shift(now, place, other)
        step_s = _step_s(now, offsets, work, limit)
        warmth = heat * (1.0 - move / moves) + 1e-9
        if step_s <= now_s or np.random.random() < np.exp((now_s - step_s) / warmth):
            now_s = step_s
            if now_s < best_s * (1 - 1e-12):
                best, best_s = now.copy(), now_s
        else:
            _shift(now, other, place)
    return best


@compiled
def _shift(actions: IntArray, place: int, other: int) -> None:
    """Take the action at `place` to `other`; those between move up."""
    action = actions[place]
    step = 1 if other > place else -1
    for at in range(place, other, step):
        actions[at] = actions[at + step]
    actions[other] = action


@compiled
def _step_s(actions: IntArray, offsets: IntArray, work: _ActionTimes, limit: int) -> float:
    """Return the step, infinity if it never ends or a rank holds more than `limit`."""
    if not _fits(actions, offsets, work.whole, limit):
        return np.inf
    num_ranks, ends_s = len(offsets) - 1, np.full(len(work.took_s), -1.0)
    at, clock_s = offsets[:-1].copy(), np.zeros(num_ranks)
    done, moved = 0, True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while at[rank] < offsets[rank + 1]:
                action = int(actions[at[rank]])
                needed_s = _needed_s(action, ends_s, work.homes, work.message_s)
                if needed_s < 0:
                    break
                clock_s[rank] = max(clock_s[rank], needed_s) + work.took_s[action]
                ends_s[action] = clock_s[rank]
                at[rank] += 1
                done += 1
                moved = True
    return float(clock_s.max()) if done == len(actions) else np.inf


@compiled
def _needed_s(action: int, ends_s: Floats, homes: IntArray, message_s: float) -> float:
    """Return when what an action waits for is on its rank; below 0 if that is not known."""
    num_stages, num_micro_batches = homes.shape
    kind, cell = action // homes.size, action % homes.size
    stage, m = cell // num_micro_batches, cell % num_micro_batches
    if kind == 2:
        return float(ends_s[homes.size + cell])
    if kind == 1 and (ends_s[cell] < 0 or stage + 1 == num_stages):
        return float(ends_s[cell])
    if kind == 0 and stage == 0:
        return 0.0
    other = stage + 1 if kind == 1 else stage - 1
    end_s = float(ends_s[kind * homes.size + other * num_micro_batches + m])
    return end_s + message_s if end_s >= 0 and homes[other, m] != homes[stage, m] else end_s


@compiled
def _fits(actions: IntArray, offsets: IntArray, whole: npt.NDArray[np.bool_], limit: int) -> bool:
    """Return whether no rank holds more than `limit` activations."""
    for rank in range(len(offsets) - 1):
        held = 0
        for place in range(offsets[rank], offsets[rank + 1]):
            kind, cell = actions[place] // len(whole), actions[place] % len(whole)
            held += 1 if kind == 0 else -1 if kind == 2 or whole[cell] else 0
            if held > limit:
                return False
    return True
