"""Exact waves: the shortest step of stages that go over the ranks and back, with its proof.

For f = i = w, a second each, and free links.  A mixed-integer program of counts: how many F and I
of each stage, and W of each rank, have begun by each tick.  In a step of T ticks no rank begins two
actions in one; of each stage no more have begun than what they wait for has ended; and the F begun
on a rank are at most `limit` more than its W ended.

Which micro-batch it is, and of which stage a W, need not be said: in any schedule the k-th F and I
of a stage may be called those of micro-batch k, and the k-th W of a rank that of its k-th I.  So
there is little to branch on, and counts that need not be whole nearly always tell what is least.
T grows until such counts can be had, then until whole ones can.

Without a barrier each rank has a window of T ticks, from its first F on, which may begin later than
another rank's: then a step of a long run is at most T ticks, and more than T - 1 if there are no
such counts for T - 1.  All F and I of rank r come before the last I of rank 0, r ticks at least,
and all but `limit` of its W as well; this says how late a window can begin.
"""

import time
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from penstock.extras import need
from penstock.schedule.exact import Optimum
from penstock.schedule.exact_problem import Model, solve
from penstock.schedule.greedy import Floats
from penstock.schedule.justify import orders_of, paired
from penstock.schedule.orders import IntArray
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import wave
from penstock.schedule.steady import steady_s
from penstock.schedule.wave_search import Objective, found, least_ticks


def exact_waves(
    num_stages: int,
    num_micro_batches: int,
    num_ranks: int,
    *,
    limit: int | None = None,
    objective: Objective = "drained",
    time_limit_s: float = 60.0,
) -> Optimum:
    """Return the shortest schedule of stages in waves, or the best after about `time_limit_s`.

    `limit` and `objective` are as for `found`, which it is never worse than.  A long run's bound is
    less than a second below the best where no other begins its actions at whole seconds and takes
    a second less.

    Raises:   ScheduleError: as of `found`.
    """
    sizes, most = (num_stages, num_micro_batches), num_stages if limit is None else limit
    best = found(*sizes, num_ranks=num_ranks, limit=limit, objective=objective)
    step_s = _step_s(best, objective)
    counts = TickCounts(wave(num_stages, num_ranks), num_micro_batches, most, objective)
    bound, ticks = counts.shortest(round(step_s), time_limit_s)
    if ticks is not None:
        best = Schedule(*sizes, orders_of(ticks, counts.homes, num_ranks))
        step_s = _step_s(best, objective)
    named = Schedule(*sizes, best.orders, name=exact_waves.__name__)
    return Optimum(named, step_s, min(step_s, counts.bound_s(bound)))


def _step_s(schedule: Schedule, objective: Objective) -> float:
    if objective == "steady":
        return steady_s(schedule)
    return drained_s(schedule)


def drained_s(schedule: Schedule) -> float:
    """Return when the last action of a step ends, if F, I and W take a second."""
    return float(schedule.play((1.0, 2.0, 1.0, 1.0, 0.0))[1].max())


@final
class TickCounts:
    """How often F and I of each stage, and W of each rank, have begun by each tick of a step.

    homes   the rank of each stage; every rank has one, and stage r is the first one of rank r
    """

    def __init__(
        self, homes: IntArray, num_micro_batches: int, limit: int, objective: Objective
    ) -> None:
        self.homes, self.limit = homes, limit
        self.objective: Objective = objective
        self.num_micro_batches = num_micro_batches
        self.own = [np.flatnonzero(homes == rank) for rank in range(int(homes.max()) + 1)]

    def relaxed(self, below: int, time_limit_s: float = np.inf) -> int:
        """Return a bound: of less ticks there are no counts, whole or not; at most `below`."""
        end_s = time.monotonic() + time_limit_s
        low = min(below, least_ticks(self.homes, self.num_micro_batches, self.objective))
        high, probe = below, below - 1  # nearly always nothing is shorter
        while low < high and (left_s := end_s - time.monotonic()) > 0:
            if _is_impossible(solve(self.model(probe, whole=False), left_s)):
                low = probe + 1
            else:
                high = probe
            probe = (low + high) // 2
        return low

    def bound_s(self, ticks: int) -> float:
        """Return seconds that no schedule takes less than, where there are no counts of less ticks.

        The step of a long run can be a mean over a cycle of some of the ranks, so not whole.
        """
        least = least_ticks(self.homes, self.num_micro_batches, self.objective)
        if self.objective == "drained" or ticks == least:
            return float(ticks)
        return ticks - 1 + 1 / len(self.own)

    def shortest(self, below: int, time_limit_s: float) -> tuple[int, IntArray | None]:
        """Return a bound of the step, and its ticks if there are any that take less than `below`.

        The ticks are of [F, I, W], [stage], [micro-batch], and take no more than the bound.
        """
        end_s = time.monotonic() + time_limit_s
        ticks = self.relaxed(below, time_limit_s)
        while ticks < below and (left_s := end_s - time.monotonic()) > 0:
            solved = solve(self.model(ticks, whole=True), left_s)
            if solved[0] is not None:
                return ticks, self._ticks(np.rint(solved[0]), ticks)
            if not _is_impossible(solved):  # it is not known
                break
            ticks += 1
        return ticks, None

    def model(self, length: int, *, whole: bool) -> Model:
        """Return the program that looks for counts in a step, or windows, of `length` ticks."""
        num_stages, num_ranks = len(self.homes), len(self.own)
        latest = self._latest(length)
        span = length + int(latest.max())
        size = (2 * num_stages + num_ranks) * span
        at = np.arange(size).reshape(-1, span)
        before = np.concatenate([np.full((len(at), 1), -1), at[:, :-1]], axis=1)
        window = size + np.arange(num_ranks * span).reshape(num_ranks, span)
        forward, backward, weights = np.split(np.arange(len(at)), [num_stages, 2 * num_stages])
        rows = _Constraints()
        rows.add([at.ravel()], [before.ravel()], 0)
        chain = [*forward, *backward[::-1]]
        rows.add([before[chain[:-1]].ravel()], [at[chain[1:]].ravel()], 0)
        for rank, own in enumerate(self.own):
            mine = [*forward[own], *backward[own], weights[rank]]
            rows.add([*before[backward[own]]], [at[weights[rank]]], 0)
            rows.add([before[weights[rank]]], [*at[forward[own]]], -self.limit)
            if self.objective == "drained":
                rows.add([*before[mine]], [*at[mine]], -1)
                continue
            now = window[rank]
            ago = np.concatenate([np.full(length, -1), now[:-length]])
            earlier = np.concatenate([[-1], now[:-1]])
            rows.add([*before[mine], now], [*at[mine], ago], 0)
            rows.add([now], [earlier], 0)
            rows.add([at[forward[rank]]], [now], 0)
        high = np.repeat(self._totals(), span)
        low = np.zeros((len(at), span))
        low[:, -1] = self._totals()
        windows = 0 if self.objective == "drained" else num_ranks * span
        begun = (np.arange(span) >= latest[:, None]).astype(np.float64)
        return Model(
            np.concatenate([low.ravel(), begun.ravel()[:windows], [0.0]]),
            np.concatenate([high, np.ones(windows), [0.0]]),
            np.append(np.full(size + windows, int(whole)), 0),
            rows.matrix(size + windows + 1),
            np.concatenate(rows.least),
            size + windows,
        )

    def _totals(self) -> Floats:
        """Return the number of actions of each kind, over all ranks."""
        of_weights = [len(own) for own in self.own]
        return self.num_micro_batches * np.append(np.ones(2 * len(self.homes)), of_weights)

    def _latest(self, length: int) -> IntArray:
        """Return the ticks by which the windows of all ranks, of `length` ticks, have begun."""
        ranks = np.arange(len(self.own))
        if self.objective == "drained":
            return 0 * ranks
        work = 3 * self.num_micro_batches * np.bincount(self.homes)
        return np.where(ranks > 0, np.maximum(length - 1 - ranks - work + self.limit, ranks), 0)

    def _ticks(self, counts: Floats, length: int) -> IntArray:
        span = length + int(self._latest(length).max())
        num_stages, numbers = len(self.homes), np.arange(self.num_micro_batches)
        rows = counts[: (2 * num_stages + len(self.own)) * span].reshape(-1, span)
        ticks = np.zeros((3, num_stages, self.num_micro_batches), np.int64)
        for stage in range(num_stages):
            for kind in range(2):
                row = rows[kind * num_stages + stage]
                ticks[kind, stage] = np.searchsorted(row, numbers + 1)
        for rank, own in enumerate(self.own):
            all_of_rank = np.arange(len(own) * self.num_micro_batches) + 1
            found_at = np.searchsorted(rows[2 * num_stages + rank], all_of_rank)
            ticks[2, own] = found_at.reshape(len(own), -1)
        return paired(ticks, self.homes)


def _is_impossible(solved: tuple[Floats | None, float]) -> bool:
    return solved[0] is None and bool(np.isinf(solved[1]))


@final
class _Constraints:
    """Rows of coefficients 1 and -1, each with the least that it may be."""

    def __init__(self) -> None:
        self.least: list[Floats] = []
        self._at: list[IntArray] = []
        self._columns: list[IntArray] = []
        self._signs: list[Floats] = []
        self._size = 0

    def add(self, plus: Sequence[IntArray], minus: Sequence[IntArray], least: float) -> None:
        """Add a row for each place in the columns: those of `plus` less those of `minus`.

        A column of -1 is nothing.
        """
        size = len(plus[0])
        for sign, columns in [(1.0, each) for each in plus] + [(-1.0, each) for each in minus]:
            some = np.flatnonzero(columns >= 0)
            self._at.append(self._size + some)
            self._columns.append(columns[some])
            self._signs.append(np.full(len(some), sign))
        self.least.append(np.full(size, float(least)))
        self._size += size

    def matrix(self, num_columns: int) -> Any:
        """Return all rows, as a csr_array of scipy."""
        need("scipy", "solvers", "an exact schedule")
        from scipy.sparse import csr_array  # pyright: ignore  - no types; loading it takes a while

        where = np.concatenate(self._at), np.concatenate(self._columns)
        shape = self._size, num_columns
        return csr_array((np.concatenate(self._signs), where), shape=shape)
