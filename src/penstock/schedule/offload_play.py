"""Offload, played: when every action and copy starts, given the order of each rank.

An order holds an F, an I, a W and an R (reload) of every micro-batch; a separate table says
whose activations are offloaded, and the R of the others is ignored.  F, I and W
are done one by one.  An R is not waited for: it starts when there is room, no earlier than the F
before it in the order, and only its I waits for it.  An activation is copied to the host when its
F has ended and the copy before it has.

The n-th F or R of a rank starts when n - limit activations have gone: offloads and W that ended.

`anneal` moves actions and reloads about and changes what is offloaded, as anneal.py does.
"""

import numpy as np

from penstock.schedule.compiled import kept
from penstock.schedule.greedy import FORWARD, INPUT, WEIGHTS, Floats
from penstock.schedule.orders import IntArray

RELOAD, OFFLOAD = 3, 4  # rows of the tables here, after F, I and W
_REACH = 6  # the most places that an action is moved
_FLIPS = 0.2  # fraction of the moves that change what is offloaded
_HEAT = 0.6  # of the shortest action: how much the step may grow at first


@kept
def play(
    order: IntArray, away: IntArray, table: Floats, message_s: float, limit: int
) -> tuple[Floats, float]:
    """Return when [F, I, W, R, offload], [stage], [micro-batch] start, and when the last W ends.

    `order` is [rank, place], kind * M + micro-batch; `away` [stage, micro-batch] is 1 for what is
    offloaded; `table` has the seconds of [F, I, W, R, offload], [stage].  The step is infinite if
    it never ends.
    """
    num_stages, num_micro_batches = away.shape
    start_s = np.full((5, num_stages, num_micro_batches), -1.0)
    at, acquired, weights = np.zeros((3, num_stages), np.int64)
    clock_s = np.zeros((3, num_stages))  # of computes, reloads, and the last F or R
    moved = True
    while moved:
        moved = False
        for turn in range(2 * num_stages):  # there and back, as the actions go
            stage = turn if turn < num_stages else 2 * num_stages - 1 - turn
            while at[stage] < order.shape[1]:
                kind, m = divmod(order[stage, at[stage]], num_micro_batches)
                if kind != RELOAD or away[stage, m]:
                    ready_s = _arrives_s(start_s, table, message_s, (kind, stage, m))
                    if kind in (FORWARD, RELOAD):
                        gone = acquired[stage] + 1 - limit
                        room_s = _room_s(start_s, away, table, (stage, weights[stage], gone))
                        ready_s = max(ready_s, room_s, clock_s[2, stage])
                    if ready_s == np.inf:
                        break
                    _do(start_s, away, table, clock_s, (kind, stage, m, ready_s))
                    acquired[stage] += kind in (FORWARD, RELOAD)
                    weights[stage] += kind == WEIGHTS
                at[stage] += 1
                moved = True
    if at.sum() < order.size:
        return start_s, np.inf
    return start_s, clock_s[0].max()


@kept
def _arrives_s(
    start_s: Floats, table: Floats, message_s: float, action: tuple[int, int, int]
) -> float:
    """Return when an action's inputs from others are there; infinity if not known yet."""
    kind, stage, m = action
    num_stages = start_s.shape[1]
    if kind == FORWARD and stage > 0:
        other, of, more_s = stage - 1, FORWARD, message_s
    elif kind == INPUT and stage < num_stages - 1:
        other, of, more_s = stage + 1, INPUT, message_s
    elif kind == RELOAD:
        other, of, more_s = stage, OFFLOAD, 0.0
    else:
        return 0.0
    begin_s = start_s[of, other, m]
    return np.inf if begin_s < 0 else begin_s + table[of, other] + more_s


@kept
def _room_s(start_s: Floats, away: IntArray, table: Floats, which: tuple[int, int, int]) -> float:
    """Return when `gone` activations of a stage have gone; `weights` of its W are known."""
    stage, weights, gone = which
    time_s, done, m = 0.0, 0, 0
    num_micro_batches = away.shape[1]
    for _ in range(gone):
        while m < num_micro_batches and not away[stage, m]:
            m += 1
        copied_s = np.inf
        if m < num_micro_batches and start_s[OFFLOAD, stage, m] >= 0:
            copied_s = start_s[OFFLOAD, stage, m] + table[OFFLOAD, stage]
        ended_s = np.inf
        if done < weights:
            ended_s = start_s[WEIGHTS, stage, done] + table[WEIGHTS, stage]
        time_s = min(copied_s, ended_s)
        if copied_s <= ended_s:
            m += 1
        else:
            done += 1
    return time_s


@kept
def _do(
    start_s: Floats,
    away: IntArray,
    table: Floats,
    clock_s: Floats,
    action: tuple[int, int, int, float],
) -> None:
    """Start an action that is ready at `ready_s` as soon as its rank can."""
    kind, stage, m, ready_s = action
    if kind == INPUT and away[stage, m]:
        ready_s = max(ready_s, start_s[RELOAD, stage, m] + table[RELOAD, stage])
    lane = 1 if kind == RELOAD else 0
    begin_s = max(ready_s, clock_s[lane, stage])
    start_s[kind, stage, m] = begin_s
    clock_s[lane, stage] = begin_s + table[kind, stage]
    if kind in (FORWARD, RELOAD):
        clock_s[2, stage] = begin_s
    if kind == FORWARD and away[stage, m]:
        copy_s = clock_s[0, stage]
        for before in range(m - 1, -1, -1):
            if away[stage, before]:
                copy_s = max(copy_s, start_s[OFFLOAD, stage, before] + table[OFFLOAD, stage])
                break
        start_s[OFFLOAD, stage, m] = copy_s


@kept
def anneal(
    order: IntArray,
    away: IntArray,
    table: Floats,
    pace: tuple[float, int],
    settings: tuple[float, int, int],
) -> tuple[IntArray, IntArray, float]:
    """Return the best order and table of copies that were found, and their step.

    `pace` is the seconds of a message and the limit; `settings` are the shortest possible step,
    the moves, and a seed.
    """
    message_s, limit = pace
    least_s, moves, seed = settings
    np.random.seed(seed)  # as machine code numba's own generator: for this loop alone
    now, gone = order.copy(), away.copy()
    _, now_s = play(now, gone, table, message_s, limit)
    best, best_gone, best_s = now.copy(), gone.copy(), now_s
    heat = _HEAT * table[:3].max()
    for move in range(moves):
        if best_s <= least_s * (1 + 1e-12):
            break
        stage = np.random.randint(len(now))
        place = np.random.randint(len(now[0]))
        to = place + np.random.randint(-_REACH, _REACH + 1)
        flip, m = np.random.random() < _FLIPS, place % away.shape[1]
        if flip:
            gone[stage, m] = 1 - gone[stage, m]
        else:
            to = shift(now[stage], place, to, away.shape[1])
            if to == place:
                continue
        _, step_s = play(now, gone, table, message_s, limit)
        warmth = heat * (1.0 - move / moves) + 1e-9
        if step_s <= now_s or np.random.random() < np.exp((now_s - step_s) / warmth):
            now_s = step_s
            if now_s < best_s * (1 - 1e-12):
                best, best_gone, best_s = now.copy(), gone.copy(), now_s
        elif flip:
            gone[stage, m] = 1 - gone[stage, m]
        else:
            shift(now[stage], to, place, away.shape[1])
    return best, best_gone, best_s


@kept
def shift(row: IntArray, place: int, to: int, num_micro_batches: int) -> int:
    """Move the action at `place` to `to`, or as near as it may go, and return where it is.

    It passes no action of its kind, nor any of its micro-batch.
    """
    step = 1 if to > place else -1
    while place != to and 0 <= place + step < len(row):
        one, other = row[place], row[place + step]
        if one // num_micro_batches == other // num_micro_batches:
            break
        if (one - other) % num_micro_batches == 0:
            break
        row[place], row[place + step] = other, one
        place += step
    return place
