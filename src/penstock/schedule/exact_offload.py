"""Exact with offload: the shortest step where activations may wait on the host, with its proof.

After its F an activation may be copied to the host, and back before its I.  A rank makes one copy
to the host at a time and one from it, alongside its compute.  On the device an activation is held
from the start of F to the end of the copy to the host, and from the start of the copy back to the
end of W, or from F to W if it stays; what is being copied counts in full.

    S = 2, M = 3, at most 1 activation; F takes two seconds, all else one; without copies 21 seconds
    rank 0  F0 F0 .  F1 F1 .  .  I0 W0 F2 F2 .  .  I1 W1 .  I2 W2
                  >0       >1 <0             >2 <1       <2
    rank 1  .  .  F0 F0 I0 W0 F1 F1 I1 W1 .  F2 F2 I2 W2

Micro-batches keep their order in each stage.  Their copies then do too, at no loss: call the
j-th copy to the host, and the j-th one back, those of the j-th micro-batch that is offloaded.  As
its F comes first it has ended when j have; as at most j - 1 copies back start before the j-th, and
none before its own copy to the host has ended, j of these have ended; and when its I starts j
copies back have ended.  No more is held at any time.

(With offload the order of micro-batches is a restriction: one that waits on the host could let
others pass.  Without offload, it is not.)

The step lies between two without copies, one under the limit and one without a limit.  Moving
actions about (offload_play.py) gives a step that it is not longer than; a mixed-integer program
(offload_problem.py) looks for a shorter one.

Source: OptPipe, arXiv:2510.05186 (the order, and which activations go to the host when, as
one integer program that starts from a heuristic).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schedule.compiled import random_numbers_kept
from penstock.schedule.exact import LESS, exact, is_least
from penstock.schedule.exact_problem import Problem, solve
from penstock.schedule.greedy import WEIGHTS, Floats, Seconds, per_stage
from penstock.schedule.offload_places import CopyPace, placed
from penstock.schedule.offload_play import OFFLOAD, RELOAD, anneal, play
from penstock.schedule.offload_problem import OffloadProblem
from penstock.schedule.orders import Action, IntArray, Kind, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.zb_greedy import best_of_rules

_KINDS: tuple[Kind, ...] = ("F", "I", "W")
_MOST_MOVES = 20_000
_ACTIONS = 2_500_000  # the most looked at in all moves from one start: about a third of a second


class Copies(NamedTuple):
    """Seconds of a copy to the host and of one back, one number for all stages or one for each."""

    offload_s: float | Sequence[float]
    reload_s: float | Sequence[float]

    def table(self, num_stages: int) -> Floats:
        """Return the seconds of [reload, offload], [stage].

        Raises:   ScheduleError: a time is negative or not a number, or there is not one per stage.
        """
        rows = per_stage(self._asdict(), num_stages)
        return np.array([rows["reload_s"], rows["offload_s"]])


class Copy(NamedTuple):
    """An activation that is offloaded: when its copies start and end."""

    stage: int
    micro_batch: int
    offload_s: float
    offloaded_s: float
    reload_s: float
    reloaded_s: float

    def __str__(self) -> str:
        to, back = (self.offload_s, self.offloaded_s), (self.reload_s, self.reloaded_s)
        return (
            f"stage {self.stage} micro-batch {self.micro_batch}  "
            f"to the host {to[0]:g} to {to[1]:g} s  back {back[0]:g} to {back[1]:g} s"
        )


class OffloadOptimum(NamedTuple):
    """The best schedule found, and a bound that no schedule can beat."""

    schedule: Schedule  # with the copies, as a rank can run them (offload_places.py)
    step_s: float
    run_s: float  # of `schedule`, whose ranks begin copies between computes
    bound_s: float
    starts_s: tuple[tuple[float, ...], ...]  # of the actions of each rank, in its order
    copies: tuple[Copy, ...]  # by stage and micro-batch

    @property
    def is_proved(self) -> bool:
        """Whether nothing is shorter, except perhaps by a millionth."""
        return is_least(self.step_s, self.bound_s)

    def __str__(self) -> str:
        proof = "no step is shorter" if self.is_proved else f"no step is below {self.bound_s:g} s"
        lines = [f"step {self.step_s:g} s, {proof}", str(self.schedule.orders)]
        return "\n".join([*lines, *map(str, self.copies)])


def exact_offload(
    num_stages: int,
    num_micro_batches: int,
    copies: Copies,
    *,
    seconds: Seconds | None = None,
    limit: int | None = None,
    time_limit_s: float = 60.0,
) -> OffloadOptimum:
    """Return the shortest schedule with one stage per rank, or the best after `time_limit_s`.

    `seconds` and `limit`, on the device, are as for `zb_greedy`, which it is never worse than; nor
    than `exact` in a sixth of the time.  It takes about a third of a second more for each start of
    its heuristic, of which there are at most M.  Without time nothing is solved, and the same is
    found whatever else the machine does.

    Ignores:  that copies and messages may share a link, and memory of the host.
    Raises:   ScheduleError: `limit` is less than 1, or a time is negative.
    """
    times, most = seconds or Seconds(), num_stages if limit is None else limit
    table = times.table(num_stages, split=True)
    case = _OffloadSetting(
        num_micro_batches, times, np.concatenate([table, copies.table(num_stages)]), most
    )
    shape, sixth_s = (num_stages, num_micro_batches), time_limit_s / 6
    without = exact(*shape, seconds=times, limit=most, time_limit_s=sixth_s)
    free = exact(*shape, seconds=times, limit=max(shape[1], most), time_limit_s=sixth_s)
    order = _order(without.schedule.orders, shape[1], None)
    found = _played(case, order, np.zeros(shape, np.int64))
    bound_s = free.bound_s
    if not is_least(found.step_s, bound_s):
        found = _moved(case, found, bound_s)
    if time_limit_s > 0 and not is_least(found.step_s, bound_s):
        better, least_s = _solved(case, found, 4 * sixth_s)
        found, bound_s = min(found, better, key=_step_s), max(bound_s, least_s)
    return _optimum(case, _with_few_copies(case, found), bound_s)


class _OffloadSetting(NamedTuple):
    num_micro_batches: int
    seconds: Seconds
    table: Floats  # seconds of [F, I, W, reload, offload], [stage]
    limit: int


class _Played(NamedTuple):
    order: IntArray  # as `play` takes it
    away: IntArray
    start_s: Floats
    step_s: float


def _step_s(found: _Played) -> float:
    return found.step_s


def _played(case: _OffloadSetting, order: IntArray, away: IntArray) -> _Played:
    played = play(order, away, case.table, float(case.seconds.message_s), case.limit)
    return _Played(order, away, *played)


def _moved(case: _OffloadSetting, found: _Played, bound_s: float) -> _Played:
    """Return the best orders that moving actions about gives, from `found` and other starts."""
    pace = float(case.seconds.message_s), case.limit
    settings = bound_s * (1 + LESS), min(_MOST_MOVES, _ACTIONS // found.order.size), 0
    for start in [found, *_starts(case)]:
        with random_numbers_kept():
            order, away, _ = anneal(start.order, start.away, case.table, pace, settings)
        found = min(found, _played(case, order, away), key=_step_s)
    return found


def _starts(case: _OffloadSetting) -> Iterator[_Played]:
    """Yield greedy schedules that hold more than the limit, with all activations offloaded."""
    num_stages, num_micro_batches = case.table.shape[1], case.num_micro_batches
    away = np.ones((num_stages, num_micro_batches), np.int64)
    for held in range(case.limit + 1, min(num_micro_batches, 2 * num_stages) + 1):
        greedy = best_of_rules(num_stages, num_micro_batches, case.seconds, held)
        yield _played(case, _order(greedy.orders, num_micro_batches, case.limit), away)


def _order(orders: Orders, num_micro_batches: int, limit: int | None) -> IntArray:
    """Return `orders` with a reload before each I, and W early enough that `limit` are reloaded."""
    rows: list[list[int]] = []
    for order in orders:
        row: list[int] = []
        reloaded = ended = 0
        for kind, _, m in order:
            while limit is not None and kind != "W" and reloaded - ended >= limit:
                row.append(WEIGHTS * num_micro_batches + ended)
                ended += 1
            if kind == "I":
                row.append(RELOAD * num_micro_batches + m)
                reloaded += 1
            if kind != "W" or m == ended:
                row.append(_KINDS.index(kind) * num_micro_batches + m)
                ended += kind == "W"
        rows.append(row)
    return np.array(rows, np.int64)


def _solved(case: _OffloadSetting, found: _Played, time_limit_s: float) -> tuple[_Played, float]:
    """Return the best below `found` that the solver finds, else `found`, and a lower bound."""
    num_stages, num_micro_batches = found.away.shape
    below_s, all_of_them = found.step_s * (1 - LESS), max(case.limit, num_micro_batches)
    problem = Problem(num_stages, num_micro_batches, case.seconds, all_of_them)
    if not problem.tighten(below_s):
        return found, below_s
    offload = OffloadProblem(problem, case.table, case.limit, below_s)
    found_x, bound_s = solve(offload.model, time_limit_s)
    better = found if found_x is None else _played(case, *offload.solution(found_x))
    return better, min(below_s, bound_s)


def _with_few_copies(case: _OffloadSetting, found: _Played) -> _Played:
    """Return `found` without the copies that it can do without, one after the other."""
    for stage, m in np.argwhere(found.away).tolist():
        away = found.away.copy()
        away[stage, m] = 0
        fewer = _played(case, found.order, away)
        if fewer.step_s <= found.step_s:
            found = fewer
    return found


def _optimum(case: _OffloadSetting, found: _Played, bound_s: float) -> OffloadOptimum:
    num_stages, num_micro_batches = found.away.shape
    orders: list[list[Action]] = []
    starts_s: list[tuple[float, ...]] = []
    for stage, order in enumerate(found.order):
        kinds, numbers = divmod(order[order < RELOAD * num_micro_batches], num_micro_batches)
        pairs = zip(kinds.tolist(), numbers.tolist(), strict=True)
        orders.append([Action(_KINDS[kind], stage, m) for kind, m in pairs])
        starts_s.append(tuple(found.start_s[kinds, stage, numbers].tolist()))
    name = exact_offload.__name__
    pace = CopyPace(case.table, float(case.seconds.message_s), case.limit)
    far, run_s = placed(found.order, found.away, found.start_s, pace)
    schedule = Schedule(num_stages, num_micro_batches, Orders.of(orders), name=name, far=far)
    copies: list[Copy] = []
    for stage, m in np.argwhere(found.away).tolist():
        out_s, back_s = found.start_s[[OFFLOAD, RELOAD], stage, m].tolist()
        ends_s = out_s + case.table[OFFLOAD, stage], back_s + case.table[RELOAD, stage]
        copies.append(Copy(stage, m, out_s, float(ends_s[0]), back_s, float(ends_s[1])))
    bound_s = min(found.step_s, bound_s)
    steps = found.step_s, max(run_s, found.step_s), bound_s
    return OffloadOptimum(schedule, *steps, tuple(starts_s), tuple(copies))
