"""Improve: swap neighbours on the critical path, for as long as that may shorten the step.

The critical path is the chain of actions that fill the step from its start to its end without a
pause.  Only swapping two of them that are neighbours on their rank can shorten the step.  In each
round the most promising swap is made, even if it makes the step longer; for some rounds it is not
undone, so that the search escapes local optima.  The best orders found are returned.

In a long run of steps without a barrier every rank begins where `steady.py` says, and a path counts
from where its first rank begins a step to where its last one begins the next.

Source: E. Taillard, "Parallel taboo search techniques for the job shop scheduling problem", 1994.
"""

from typing import NamedTuple

import numpy as np

from penstock.schedule.clock import Clockwork, Numbers, clockwork, log_of, numbers_of, run
from penstock.schedule.compiled import compiled
from penstock.schedule.greedy import FORWARD, INPUT, WEIGHTS, Floats, Result, Seconds, least_step_s
from penstock.schedule.orders import F, I, IntArray, Orders, W
from penstock.schedule.stage_placement import one_way
from penstock.schedule.steady import LongRun, period_s
from penstock.schedule.zero_bubble_rounds import ROUNDING, Room

_ROUNDS_KEPT, _MORE_ROUNDS = 12, 11  # a swap is not undone for 12 to 22 rounds
_MOST_ROUNDS = 4000
_ACTIONS = 40_000  # the most looked at in all rounds: a millisecond or two
_FEW_ACTIONS = 80_000  # the same for the smallest schedules, less this many for each action:
_LESS_PER_ACTION = 60
_PASSES = 4  # through a step, to find where ranks begin one
_NEAR = 1e-12  # of a step: equal


class _Actions(NamedTuple):
    """Actions by number, (kind * S + stage) * M + micro-batch."""

    work: Clockwork
    before: IntArray  # of each the action on another rank that it waits for; -1 for none
    after: IntArray  # of each the one that waits for it
    change: Floats  # of F, I and W: of what a rank holds
    limit: float


class _EndsAndTails(NamedTuple):
    steps: LongRun
    row_s: Floats  # room for the ends of the rows
    starts_s: Floats  # [rank]: when it begins, and before when it begins the next step
    tail_s: Floats  # of each action, from its end to the end of the step
    held: Floats  # [rank, place]: activations, when the action there has ended


def improve(
    result: Result,
    seconds: Seconds,
    shape: tuple[int, int],
    limit: float,
    *,
    weight_share: float = 1.0,
    is_steady: bool = False,
) -> Result:
    """Return orders of F, I and W on the same ranks, no longer than the orders of `result`.

    `shape` is stages and micro-batches; each stage lives on one rank, and all ranks have as many.
    No rank holds more than `limit` activations, if none does in `result`; of each the
    `weight_share` is left from I until W.  With `is_steady` the step is one of a long run without
    a barrier.
    """
    homes, num_ranks = _homes(result.orders, shape), len(result.orders)
    table = seconds.table(shape[0], split=True)
    if is_steady:
        least_s = float(shape[1] * np.bincount(homes[:, 0], table.sum(axis=0)).max())
    else:
        least_s = least_step_s(homes, table, seconds.message_s)
    if result.step_s <= least_s * (1 + _NEAR):
        return result
    actions = _actions(table, homes, seconds.message_s, Room(limit, weight_share))
    given = numbers_of(result.orders, shape)
    actions_seen = max(_ACTIONS, _FEW_ACTIONS - _LESS_PER_ACTION * given.size)
    rounds = min(_MOST_ROUNDS, actions_seen // (given.size * (_PASSES if is_steady else 1)))
    times, sizes = _times(given.size, num_ranks), (least_s, shape[1], rounds)
    given, offsets = given.reshape(num_ranks, -1), result.orders.offsets
    found, step_s = _search(given, offsets, actions, times, sizes, is_steady)
    if step_s >= result.step_s * (1 - _NEAR):
        return result
    return Result(orders_of(found, shape), float(step_s))


def orders_of(numbers: Numbers, shape: tuple[int, int]) -> Orders:
    """Return the orders of F, I and W whose numbers are [rank, place]."""
    kinds, stages, micro_batches = np.unravel_index(numbers.ravel(), (3, *shape))
    codes = np.array([F, I, W], np.uint8)[kinds]
    offsets = np.arange(len(numbers) + 1, dtype=np.int64) * numbers.shape[1]
    return Orders(codes, stages.astype(np.int32), micro_batches.astype(np.int32), offsets)


def step_of(orders: Orders, seconds: Seconds, shape: tuple[int, int]) -> float:
    """Return the seconds of a step, given orders of F, I and W, each stage on one rank."""
    table = seconds.table(shape[0], split=True)
    work = _work(table, _homes(orders, shape), seconds.message_s)
    given = numbers_of(orders, shape)
    _, clock_s = run(given, orders.offsets, work, log_of(given.size))
    return float(clock_s.max())


def steady_of(orders: Orders, seconds: Seconds, shape: tuple[int, int]) -> float:
    """Return the seconds per step of a long run without a barrier, by these orders."""
    table, given = seconds.table(shape[0], split=True), numbers_of(orders, shape)
    actions = _actions(table, _homes(orders, shape), seconds.message_s, Room(np.inf, 1.0))
    times = _times(given.size, len(orders))
    return float(_time(given.reshape(len(orders), -1), orders.offsets, actions, times, True))


def _homes(orders: Orders, shape: tuple[int, int]) -> IntArray:
    """Return the rank of every [stage, micro-batch]."""
    homes = np.empty(shape[0], np.int64)
    homes[orders.stages] = np.repeat(np.arange(len(orders)), np.diff(orders.offsets))
    return one_way(homes, shape[1])


def _work(table: Floats, homes: IntArray, message_s: float) -> Clockwork:
    took_s = np.repeat(table.ravel(), homes.shape[1])
    return clockwork(homes.astype(np.int32), took_s, float(message_s))


def _actions(table: Floats, homes: IntArray, message_s: float, room: Room) -> _Actions:
    """Return kind, neighbours, rank, seconds and room of each action, by number."""
    shape = 3, *homes.shape
    number = np.arange(3 * homes.size).reshape(shape)
    before, after = np.full((2, *shape), -1)
    goes = homes[1:] != homes[:-1]  # on to another rank
    before[FORWARD, 1:] = np.where(goes, number[FORWARD, :-1], -1)
    before[INPUT, :-1] = np.where(goes, number[INPUT, 1:], -1)
    after[FORWARD, :-1] = np.where(goes, number[FORWARD, 1:], -1)
    after[INPUT, 1:] = np.where(goes, number[INPUT, :-1], -1)
    change = np.array([1.0, room.weight_share - 1.0, -room.weight_share])
    work, limit = _work(table, homes, message_s), float(room.limit) + ROUNDING
    return _Actions(work, before.ravel(), after.ravel(), change, limit)


def _times(size: int, num_ranks: int) -> _EndsAndTails:
    """Return arrays for `size` actions."""
    log, none = log_of(size, size, num_ranks), np.empty((0, 2), np.int64)
    steps = LongRun(log, np.zeros(size, np.int64), np.zeros(size), np.zeros(size), none)
    held = np.zeros((num_ranks, size // num_ranks))
    return _EndsAndTails(steps, np.zeros(size), np.zeros(num_ranks), np.zeros(size), held)


@compiled
def _search(
    sequence: Numbers,
    offsets: IntArray,
    actions: _Actions,
    times: _EndsAndTails,
    sizes: tuple[float, int, int],
    is_steady: bool,
) -> tuple[Numbers, float]:
    """Return the best sequences of the ranks, [rank, place], and their step."""
    least_s, num_micro_batches, rounds = sizes
    size = sequence.size
    best, best_s = sequence.copy(), _time(sequence, offsets, actions, times, is_steady)
    _hold(sequence, actions, times, 0, len(sequence))
    kept = np.zeros(size, np.int64)  # the round until which an action is not moved back
    now_s = best_s
    for round_ in range(rounds):
        both_s, at = (now_s, best_s), (num_micro_batches, round_)
        rank, place = _best_swap(sequence, actions, both_s, times, kept, at)
        if rank < 0:
            if kept.max() <= round_:  # no order on the critical path can differ: the shortest
                break
            kept[:] = 0  # all were swapped a short while ago
            continue
        rounds_kept = _ROUNDS_KEPT + 7 * round_ % _MORE_ROUNDS
        first, then = sequence[rank, place], sequence[rank, place + 1]
        sequence[rank, place], sequence[rank, place + 1] = then, first
        kept[first] = round_ + rounds_kept
        now_s = _time(sequence, offsets, actions, times, is_steady)
        if now_s == np.inf:  # no rank could go on: undo it
            sequence[rank, place], sequence[rank, place + 1] = first, then
            kept[then] = round_ + rounds_kept
            now_s = _time(sequence, offsets, actions, times, is_steady)
            continue
        _hold(sequence, actions, times, rank, rank + 1)
        if now_s < best_s * (1 - _NEAR):
            best, best_s = sequence.copy(), now_s
            if best_s <= least_s * (1 + _NEAR):
                break
    return best, best_s


@compiled
def _hold(sequence: Numbers, actions: _Actions, times: _EndsAndTails, rank: int, last: int) -> None:
    """Write down the levels of the ranks from `rank` to before `last`."""
    num_kinds, size = len(actions.change), sequence.size
    for at in range(rank, last):
        held = 0.0
        for place in range(sequence.shape[1]):
            held += actions.change[sequence[at, place] // (size // num_kinds)]
            times.held[at, place] = held


@compiled
def _time(
    sequence: Numbers, offsets: IntArray, actions: _Actions, times: _EndsAndTails, is_steady: bool
) -> float:
    """Return the step, infinity if it never ends, and put ends and tails into `times`."""
    numbers, length, log = sequence.ravel(), sequence.shape[1], times.steps.log
    at, clock_s = run(numbers, offsets, actions.work, log)
    if at.sum() < offsets[1:].sum():
        return np.inf
    took_s, message_s, step_s = actions.work.took_s, actions.work.message_s, clock_s.max()
    if is_steady:
        for row in range(len(numbers)):
            place = log.place[row]
            times.steps.ranks[row] = place // length
            times.steps.took_s[row] = took_s[numbers[place]]
            times.steps.wait_s[row] = message_s if log.source[row] != log.previous[row] else 0.0
        step_s = period_s(times.steps, times.starts_s, times.row_s)
        for row in range(len(numbers)):
            log.ends_s[numbers[log.place[row]]] = times.row_s[row]
    left_s = -times.starts_s
    for row in range(len(numbers) - 1, -1, -1):
        place = log.place[row]
        action, rank = numbers[place], place // length
        tail_s, other = left_s[rank], actions.after[action]
        if other >= 0:
            tail_s = max(tail_s, message_s + took_s[other] + times.tail_s[other])
        times.tail_s[action] = tail_s
        left_s[rank] = tail_s + took_s[action]
    return float(step_s)


@compiled
def _best_swap(
    sequence: Numbers,
    actions: _Actions,
    seconds: tuple[float, float],
    times: _EndsAndTails,
    kept: IntArray,
    sizes: tuple[int, int],
) -> tuple[int, int]:
    """Return rank and place of the swap with the least longest path through the two, or -1."""
    now_s, best_s = seconds
    num_micro_batches, round_ = sizes
    ends_s, tail_s = times.steps.log.ends_s, times.tail_s
    critical_s = now_s * (1 - _NEAR)
    num_ranks, length = sequence.shape
    size = num_ranks * length
    num_stages = size // (3 * num_micro_batches)
    found, found_place, least_s = -1, -1, np.inf
    for rank in range(num_ranks):
        for place in range(length - 1):
            a, b = sequence[rank, place], sequence[rank, place + 1]
            if min(ends_s[a] + tail_s[a], ends_s[b] + tail_s[b]) < critical_s:
                continue
            kind_a, kind_b = a // (size // 3), b // (size // 3)
            m_a, m_b = a % num_micro_batches, b % num_micro_batches
            stage_a = a // num_micro_batches % num_stages
            stage_b = b // num_micro_batches % num_stages
            if stage_a == stage_b and kind_a == kind_b:
                continue
            needs = kind_a != WEIGHTS and (kind_b != WEIGHTS or stage_b <= stage_a)
            if m_a == m_b and needs:  # F before I, and so on: b needs a
                continue
            held = times.held[rank, place] - actions.change[kind_a] + actions.change[kind_b]
            if held > actions.limit:
                continue
            path_s = _path_s(sequence[rank], place, actions, times, times.starts_s[rank])
            if kept[b] > round_ and path_s >= best_s:
                continue
            if path_s < least_s:
                found, found_place, least_s = rank, place, path_s
    return found, found_place


@compiled
def _path_s(
    row: Numbers, place: int, actions: _Actions, times: _EndsAndTails, start_s: float
) -> float:
    """Return the longest path through the actions at `place` and after it, were they swapped."""
    a, b = row[place], row[place + 1]
    took_s, message_s, ends_s = actions.work.took_s, actions.work.message_s, times.steps.log.ends_s
    b_s, rest_s = start_s, -start_s
    if place > 0:
        b_s = ends_s[row[place - 1]]
    if place + 2 < len(row):
        rest_s = took_s[row[place + 2]] + times.tail_s[row[place + 2]]
    other = actions.before[b]
    if other >= 0:
        b_s = max(b_s, ends_s[other] + message_s)
    a_s, other = b_s + took_s[b], actions.before[a]
    if other >= 0:
        a_s = max(a_s, ends_s[other] + message_s)
    other = actions.after[a]
    if other >= 0:
        rest_s = max(rest_s, message_s + took_s[other] + times.tail_s[other])
    b_rest_s, other = took_s[a] + rest_s, actions.after[b]
    if other >= 0:
        b_rest_s = max(b_rest_s, message_s + took_s[other] + times.tail_s[other])
    return float(max(a_s + took_s[a] + rest_s, b_s + took_s[b] + b_rest_s))
