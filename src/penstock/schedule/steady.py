"""Steady: seconds per step of a long run of steps, one after the other without a barrier.

A rank begins its next step as soon as it has ended this one, whatever the others do; a stage on
several ranks first waits for the last backward on all of them, whose gradients are summed.  Let
A[r, q] be the longest path from the beginning of a step on rank q to its end on rank r.  In a long
run, ends of steps are powers of A over (max, +), so a step takes its largest mean of a cycle:

    a rank after itself        A[r, r], nearly always: the longest rank's own span
    several in turn            (A[r, q] + A[q, r]) / 2, ...

It is also the least that the longest rank's own span can be, from its first action to its last, if
ranks may begin later than they could.  That is what zero bubble minimises.

One pass through a step tells the ends for given beginnings, and for each end on
which rank its longest path began.  These make cycles; beginnings are put where the best of
them wants them, until no rank takes longer than that cycle says (Howard's policy iteration).  Paths
that are equally long can keep it from an end; then A is built, a pass for each rank.

Source:   Zero Bubble, arXiv:2401.10241 (the objective); J. Cochet-Terrasson et al.,
"Numerical computation of spectral elements in max-plus algebra", 1998; R. M. Karp, "A
characterization of the minimum cycle mean in a digraph", 1978.
"""

from typing import NamedTuple

import numpy as np

from penstock.schedule.clock import (
    Clockwork,
    Floats,
    Log,
    joins_of,
    log_of,
    numbers_of,
    run,
)
from penstock.schedule.compiled import compiled
from penstock.schedule.greedy import Seconds
from penstock.schedule.orders import B, F, I, IntArray, W
from penstock.schedule.schedule import Schedule

_NEAR = 1e-12  # of a step: equal
_AHEAD = 1e6  # steps: as far as beginnings are moved apart where one cycle is slower than another
_ROUNDS = 10
_FAR = 1e15  # seconds before: too early to be what anything waits for


class LongRun(NamedTuple):
    """A step, played again and again: the rows of its log."""

    log: Log
    ranks: IntArray  # [row]
    took_s: Floats  # [row]: 0 for joins
    wait_s: Floats  # [row]: from the end of its source
    sums: IntArray  # [pair]: a rank, and a row on another one that its next step waits for


def steady_s(schedule: Schedule, seconds: Seconds | None = None) -> float:
    """Return the seconds per step of a long run of `schedule`; by default f = i = w = 1.

    A window of several steps is followed by the next one in the same way.

    Ignores:  what updates and sums of gradients take; that messages may share a link.
    Raises:   ScheduleError: a time is negative.
    """
    return _period_s(_steps(schedule, seconds or Seconds())) / schedule.num_steps


def steady_bubble_fraction(schedule: Schedule, seconds: Seconds | None = None) -> float:
    """Return the idle part of all ranks' time in such a run."""
    steps = _steps(schedule, seconds or Seconds())
    total_s = schedule.num_ranks * _period_s(steps)
    return 1 - float(steps.took_s.sum()) / total_s if total_s > 0 else 0.0


def _period_s(steps: LongRun) -> float:
    starts_s, ends_s = np.zeros(len(steps.log.last)), np.empty(len(steps.took_s))
    return float(period_s(steps, starts_s, ends_s))


def _steps(schedule: Schedule, seconds: Seconds) -> LongRun:
    orders, shape = schedule.orders, schedule.ranks.shape
    table = np.zeros((5, shape[0]))  # by kind
    table[[F, I, W]] = seconds.table(shape[0], split=True)
    table[W] *= schedule.together
    table[B] = schedule.together * table[I] + table[W]
    updates = schedule.num_steps if schedule.has_updates else 0
    numbers, joins = numbers_of(orders, shape, updates), joins_of(orders, shape, updates)
    num_rows = len(numbers) + int(np.maximum(joins.left - 1, 0).sum())
    log = log_of(2 * schedule.ranks.size, num_rows, schedule.num_ranks)
    run(numbers, orders.offsets, Clockwork(schedule.ranks, np.zeros(1), 0.0, joins), log)
    is_action = log.place >= 0
    place = log.place[is_action]
    took_s, wait_s = np.zeros((2, num_rows))
    took_s[is_action] = table[orders.kinds[place], orders.stages[place]]
    is_sent = (log.source != log.previous)[is_action] & (numbers[place] < 2 * schedule.ranks.size)
    wait_s[is_action] = seconds.message_s * is_sent
    ranks = np.searchsorted(orders.offsets, log.place, side="right") - 1
    pairs = [] if updates else _sums(schedule, log, ranks)
    return LongRun(log, ranks, took_s, wait_s, np.array(pairs, np.int64).reshape(-1, 2))


def _sums(schedule: Schedule, log: Log, ranks: IntArray) -> list[tuple[int, int]]:
    """Return the ranks of stages on several, each with the last backward's row on the others."""
    orders, pairs = schedule.orders, list[tuple[int, int]]()
    is_last = np.isin(orders.kinds[log.place], (B, W))
    for stage, homes in enumerate(schedule.stage_ranks):
        if len(homes) > 1:
            rows = np.flatnonzero(is_last & (orders.stages[log.place] == stage))
            last = dict(zip(ranks[rows].tolist(), rows.tolist(), strict=True))
            pairs += [(rank, last[other]) for rank in last for other in last if other != rank]
    return pairs


@compiled
def period_s(steps: LongRun, starts_s: Floats, ends_s: Floats) -> float:
    """Return the largest mean of a cycle, and leave in `starts_s` when ranks begin a step then.

    `ends_s` is room for the end of each row.
    """
    origin = np.empty(len(ends_s), np.int64)
    done_s, since = np.empty(len(starts_s)), np.empty(len(starts_s), np.int64)
    longest_s = np.empty((len(starts_s), len(starts_s)))
    for _ in range(_ROUNDS):
        ends_of(steps, starts_s, ends_s, origin)
        _done(steps, starts_s, ends_s, origin, done_s, since)
        most_s = (done_s - starts_s).max()  # whatever the beginnings are, no cycle has more
        mean_s = _largest_mean(starts_s, done_s, since)
        if most_s <= mean_s * (1 + _NEAR):
            return float(most_s)
        _begin(starts_s, done_s, since, mean_s)
    for first in range(len(starts_s)):  # paths tie: look at all of them
        starts_s[:] = -_FAR
        starts_s[first] = 0.0
        ends_of(steps, starts_s, ends_s, origin)
        _done(steps, starts_s, ends_s, origin, done_s, since)
        longest_s[:, first] = np.where(since == first, done_s, -np.inf)
    mean_s = _mean_of(longest_s)
    starts_s[:] = 0.0
    for _ in range(len(starts_s)):
        for rank in range(len(starts_s)):
            starts_s[rank] = max(starts_s[rank], (longest_s[rank] + starts_s).max() - mean_s)
    starts_s -= starts_s.min()
    ends_of(steps, starts_s, ends_s, origin)
    return mean_s


@compiled
def _done(
    steps: LongRun,
    starts_s: Floats,
    ends_s: Floats,
    origin: IntArray,
    done_s: Floats,
    since: IntArray,
) -> None:
    """Fill in when each rank may begin its next step, and the rank where that path begins."""
    for rank in range(len(starts_s)):
        row = steps.log.last[rank]
        done_s[rank] = ends_s[row] if row >= 0 else starts_s[rank]
        since[rank] = origin[row] if row >= 0 else rank
    for pair in range(len(steps.sums)):
        rank, row = steps.sums[pair]
        if ends_s[row] > done_s[rank]:
            done_s[rank], since[rank] = ends_s[row], origin[row]


@compiled
def _mean_of(longest_s: Floats) -> float:
    """Return the largest mean of a cycle, given the longest path to each rank from each (Karp)."""
    size = len(longest_s)
    walks_s = np.zeros((size + 1, size))  # of so many paths, to each rank
    for length in range(size):
        for rank in range(size):
            walks_s[length + 1, rank] = (longest_s[rank] + walks_s[length]).max()
    most_s = -np.inf
    for rank in range(size):
        least_s = np.inf
        for length in range(size):
            mean_s = (walks_s[size, rank] - walks_s[length, rank]) / (size - length)
            least_s = min(least_s, mean_s)
        most_s = max(most_s, least_s)
    return most_s


@compiled
def ends_of(steps: LongRun, starts_s: Floats, ends_s: Floats, origin: IntArray) -> None:
    """Fill in the end of each row, and the rank on which the longest path to it begins."""
    log = steps.log
    for row in range(len(ends_s)):
        before, source, rank = log.previous[row], log.source[row], steps.ranks[row]
        begin_s, since = (ends_s[before], origin[before]) if before >= 0 else (starts_s[rank], rank)
        if source >= 0 and ends_s[source] + steps.wait_s[row] > begin_s:
            begin_s, since = ends_s[source] + steps.wait_s[row], origin[source]
        ends_s[row], origin[row] = begin_s + steps.took_s[row], since


@compiled
def _largest_mean(starts_s: Floats, done_s: Floats, since: IntArray) -> float:
    """Return the largest mean of the cycles that the longest paths close."""
    most_s = -np.inf
    for rank in range(len(since)):
        most_s = max(most_s, _cycle(rank, starts_s, done_s, since)[1])
    return most_s


@compiled
def _begin(starts_s: Floats, done_s: Floats, since: IntArray, mean_s: float) -> None:
    """Move beginnings to where the longest paths want them."""
    wanted_s = np.empty(len(since))
    for rank in range(len(since)):
        anchor, own_s = _cycle(rank, starts_s, done_s, since)
        wanted_s[rank] = starts_s[anchor] + _AHEAD * (own_s - mean_s)
        at = rank
        while at != anchor:
            wanted_s[rank] += done_s[at] - starts_s[since[at]] - own_s
            at = since[at]
    starts_s[:] = wanted_s - wanted_s.min()


@compiled
def _cycle(rank: int, starts_s: Floats, done_s: Floats, since: IntArray) -> tuple[int, float]:
    """Return a rank on the cycle that the longest path to `rank` comes from, and its mean."""
    for _ in range(len(since)):
        rank = int(since[rank])
    first, at, length, total_s = rank, int(since[rank]), 1, done_s[rank] - starts_s[since[rank]]
    while at != rank:
        first, length = min(first, at), length + 1
        total_s += done_s[at] - starts_s[since[at]]
        at = int(since[at])
    return first, total_s / length
