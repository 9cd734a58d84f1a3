"""Justify: move every action of a pattern as early as it can be, then as late, and so on.

Each F, I and W takes one tick.  An action moves to the first tick at which its rank is free, what
it waits for is done, and the rank would hold no more than its limit in between.  Seen from the end
of the step the same is done to the later side; what has been pushed together on one side leaves
room on the other, and the step gets shorter until nothing gives.  Any W of a rank frees one
activation, so the k-th W on a rank is always that of its k-th I.

Source: V. Valls, F. Ballestin and S. Quintanilla, "Justification and RCPSP: a technique that
pays", 2005.
"""

from typing import NamedTuple

import numpy as np

from penstock.schedule.clock import clockwork, log_of, numbers_of, run
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import IntArray, Kind, Orders, Row, arrange
from penstock.schedule.schedule import Schedule

_KINDS: tuple[Kind, ...] = ("F", "I", "W")
_ROUNDS = 4  # without any gain, until it is over


class _Ties(NamedTuple):
    """Actions by number, (kind * S + stage) * M + micro-batch, kinds F, I and W."""

    rank: IntArray
    neighbours: IntArray  # of [side, action]: up to three that it comes after, then before; or -1


def justify(
    ticks: IntArray, homes: IntArray, limit: int, offsets: IntArray | None = None
) -> IntArray:
    """Return ticks of [F, I, W], [stage], [micro-batch] of a step that is as short, or shorter.

    `homes` is the rank of each stage.  In `ticks` every action comes after those that it waits for
    and no rank does two at once; it holds at most `limit` activations, and in what is returned too.
    A rank may begin and end `offsets` ticks later, by default 0: what gets no longer is the time
    from the earliest begin to the latest end, as each rank counts it.
    """
    shape, ties = ticks.shape, _ties_of(ticks.shape, homes)
    later = np.zeros(int(homes.max()) + 1, np.int64) if offsets is None else offsets
    now = best = ticks.ravel().astype(np.int64)
    gainless = 0
    while gainless < _ROUNDS:
        for side, start in enumerate((later, later.max() - later)):
            way = 1 - 2 * side
            seen = way * now
            seen -= (seen - start[ties.rank]).min()
            now = way * _pull(seen, ties, side, limit, start)
            now = paired(now.reshape(shape), homes).ravel()
        shorter = _length(now, later[ties.rank]) < _length(best, later[ties.rank])
        gainless = 0 if shorter else gainless + 1
        best = now if shorter else best
    return (best - best.min()).reshape(shape)


def orders_of(ticks: IntArray, homes: IntArray, num_ranks: int) -> Orders:
    """Return the orders of actions at ticks of [F, I, W], [stage], [micro-batch]."""
    rows: list[list[Row]] = [[] for _ in range(num_ranks)]
    numbers = np.arange(ticks.shape[-1], dtype=np.int64)
    for kind, of_kind in zip(_KINDS, ticks, strict=True):
        for stage, times in enumerate(of_kind):
            rows[int(homes[stage])].append(Row(kind, stage, numbers, times))
    return arrange(rows)


def ticks_of(schedule: Schedule) -> IntArray:
    """Return the ticks of [F, I, W], [stage], [micro-batch] of a step whose backwards are I and W.

    Each action begins as early as the orders let it.
    """
    shape = schedule.ranks.shape
    numbers, took_s = numbers_of(schedule.orders, shape), np.ones(1)
    log = log_of(numbers.size)
    run(numbers, schedule.orders.offsets, clockwork(schedule.ranks, took_s), log)
    return log.ends_s.astype(np.int64).reshape(3, *shape) - 1


def _length(ticks: IntArray, offsets: IntArray) -> int:
    own = ticks - offsets
    return int(own.max() - own.min())


def _ties_of(shape: tuple[int, ...], homes: IntArray) -> _Ties:
    number = np.arange(np.prod(shape)).reshape(shape)
    comes_after = np.full((3, *shape), -1)
    forward, backward, weights = number
    comes_after[0, 0, 1:], comes_after[0, 1, :-1] = forward[:-1], backward[1:]
    comes_after[1, :2, :, 1:] = number[:2, :, :-1]
    comes_after[2, 1], comes_after[2, 2] = forward, backward
    comes_before = np.full((3, *shape), -1)
    comes_before[0, 0, :-1], comes_before[0, 1, 1:] = forward[1:], backward[:-1]
    comes_before[1, :2, :, :-1] = number[:2, :, 1:]
    comes_before[2, 0], comes_before[2, 1] = backward, weights
    rank = np.broadcast_to(homes[None, :, None], shape).astype(np.int64)
    sides = [side.reshape(3, -1).T for side in (comes_after, comes_before)]
    return _Ties(rank.ravel(), np.ascontiguousarray(sides, np.int64))


@compiled
def _pull(ticks: IntArray, ties: _Ties, side: int, limit: int, start: IntArray) -> IntArray:
    """Return earlier ticks; on side 1 they count from the end, and a W takes what an F frees."""
    size, end = len(ticks) // 3, ticks.max() + 1
    num_ranks = ties.rank.max() + 1
    is_taken = np.zeros((num_ranks, end), np.bool_)
    held = np.zeros((num_ranks, end + 1), np.int64)
    ticks = ticks.copy()
    for action in range(len(ticks)):
        rank, kind = ties.rank[action], action // size
        is_taken[rank, ticks[action]] = True
        if kind == 2 * side:
            held[rank, ticks[action]] += 1
        elif kind == 2 - 2 * side:
            held[rank, ticks[action] + 1] -= 1
    for rank in range(num_ranks):
        held[rank] = np.cumsum(held[rank])
    for action in np.argsort(ticks, kind="mergesort"):
        rank, kind, old = ties.rank[action], action // size, ticks[action]
        first = start[rank]
        for other in ties.neighbours[side, action]:
            if other >= 0:
                first = max(first, ticks[other] + 1)
        if kind == 2 * side:
            room = old
            while room > first and held[rank, room - 1] < limit:
                room -= 1
            first = room
        tick = first
        while tick < old and is_taken[rank, tick]:
            tick += 1
        if tick >= old:
            continue
        is_taken[rank, old], is_taken[rank, tick], ticks[action] = False, True, tick
        if kind == 2 * side:
            held[rank, tick:old] += 1
        elif kind == 2 - 2 * side:
            held[rank, tick + 1 : old + 1] -= 1
    return ticks


def paired(ticks: IntArray, homes: IntArray) -> IntArray:
    """Return the same ticks, the k-th W on a rank for its k-th I."""
    paired = ticks.copy()
    for rank in range(int(homes.max()) + 1):
        mine = homes == rank
        _, inputs, weights = ticks[:, mine].reshape(3, -1)
        own = np.empty_like(weights)
        own[np.argsort(inputs)] = np.sort(weights)
        paired[2, mine] = own.reshape(int(mine.sum()), -1)
    return paired
