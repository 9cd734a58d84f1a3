"""Anneal: move actions about in the orders of their ranks, while no rank holds more than before.

A move takes an action a few places forward or back on its rank.  One that does not lengthen the
step is kept; one that does is kept now and then, less and less often.  What comes out is as short
as the schedule that went in, or shorter: V-Half on four ranks with eight micro-batches, 55 seconds
long if every action takes one, becomes 53 seconds long with the same activations.

Source: S. Kirkpatrick et al., "Optimization by simulated annealing", 1983.
"""

from dataclasses import replace

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.compiled import compiled
from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Floats, Seconds
from penstock.schedule.orders import B, I, IntArray, Orders, W
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

    Ignores:  messages; memory of stages of unequal size.
    Raises:   ScheduleError: a schedule of several steps, or one that holds more than `limit`.
    """
    held = max(peak_activations(schedule))
    most = held if limit is None else limit
    if schedule.has_updates or schedule.num_steps > 1:
        hint = "anneal a schedule that drains"
        raise ScheduleError(f"{schedule.name or 'it'} is of several steps", hint=hint)
    if held > most:
        raise ScheduleError(f"a rank holds {held} activations of {most}", hint="raise the limit")
    orders = schedule.orders
    split = not bool((orders.kinds == B).any())
    table = (seconds or Seconds()).table(schedule.num_stages, split=split)
    rows = np.array([0, 1, 1, 2, 0])[orders.kinds]
    size = schedule.num_stages * schedule.num_micro_batches
    actions = rows * size + orders.stages * schedule.num_micro_batches + orders.micro_batches
    shape = (schedule.num_stages, schedule.num_micro_batches)
    best = _anneal(actions.astype(np.int64), orders.offsets, table, shape, (most, moves, seed))
    kinds, stages, numbers = np.unravel_index(best, (3, *shape))
    codes = np.array([0, I if split else B, W], np.uint8)[kinds]
    made = Orders(codes, stages.astype(np.int32), numbers.astype(np.int32), orders.offsets)
    return replace(schedule, orders=made)


@compiled
def _anneal(
    actions: IntArray,
    offsets: IntArray,
    table: Floats,
    shape: tuple[int, int],
    settings: tuple[int, int, int],
) -> IntArray:
    """Return the best order of all actions met, rank after rank as in `actions`."""
    limit, moves, seed = settings
    np.random.seed(seed)  # numba's own generator: of this loop alone
    now = actions.copy()
    now_s = _step_s(now, offsets, table, shape, limit)
    best, best_s, heat = now.copy(), now_s, _HEAT * table.max()
    for move in range(moves):
        place = np.random.randint(len(now))
        rank = np.searchsorted(offsets, place, side="right") - 1
        other = place + np.random.randint(-_REACH, _REACH + 1)
        if other == place or other < offsets[rank] or other >= offsets[rank + 1]:
            continue
        _shift(now, place, other)
        step_s = _step_s(now, offsets, table, shape, limit)
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
def _step_s(
    actions: IntArray, offsets: IntArray, table: Floats, shape: tuple[int, int], limit: int
) -> float:
    """Return the step, infinity if it never ends or a rank holds more than `limit`."""
    if not _fits(actions, offsets, shape[0] * shape[1], limit):
        return np.inf
    num_stages, num_micro_batches = shape
    size, num_ranks = num_stages * num_micro_batches, len(offsets) - 1
    ends_s = np.full(3 * size, -1.0)
    at, clock_s = offsets[:-1].copy(), np.zeros(num_ranks)
    done, moved = 0, True
    while moved:
        moved = False
        for rank in range(num_ranks):
            while at[rank] < offsets[rank + 1]:
                action = actions[at[rank]]
                kind, cell = action // size, action % size
                stage, needed_s = cell // num_micro_batches, 0.0
                if kind == 0 and stage > 0:
                    needed_s = ends_s[cell - num_micro_batches]
                elif kind == 1:
                    last = stage == num_stages - 1
                    needed_s = ends_s[cell] if last else ends_s[size + cell + num_micro_batches]
                    needed_s = min(needed_s, ends_s[cell]) if ends_s[cell] < 0 else needed_s
                elif kind == 2:
                    needed_s = ends_s[size + cell]
                if needed_s < 0:
                    break
                clock_s[rank] = max(clock_s[rank], needed_s) + table[kind, stage]
                ends_s[action] = clock_s[rank]
                at[rank] += 1
                done += 1
                moved = True
    if done < len(actions):
        return np.inf
    return clock_s.max()


@compiled
def _fits(actions: IntArray, offsets: IntArray, size: int, limit: int) -> bool:
    """Return whether no rank holds more than `limit` activations."""
    has_weights = len(actions) > 2 * size
    for rank in range(len(offsets) - 1):
        held = 0
        for place in range(offsets[rank], offsets[rank + 1]):
            kind = actions[place] // size
            held += 1 if kind == 0 else -1 if kind == 2 or not has_weights else 0
            if held > limit:
                return False
    return True
