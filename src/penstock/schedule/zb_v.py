"""ZB-V: two stages per rank, in a V, so that no rank waits, with the memory of 1F1B.

Rank r has stages r and 2 R - 1 - r: the first rank has the loss, and needs no gradient from
another rank to begin its backwards.  It does F and I in this order, as far as there are any; f
and i are those of stage r, F and I those of stage 2 R - 1 - r:

    2 (R - r) - 1 times f,  r times F f,  R - r times F I,  then f i F I again and again

W come where the rank would wait, or where it holds 2 R half stages, as the first rank of 1F1B holds
R whole ones.  If F, I and W take equally long, no rank waits between its first action and its
last.  For other seconds a W that does not fit into a wait comes only where the rank would idle
longer than the others, or than one has to; other greedy orders are tried as well, and in the best
of all neighbours are swapped (improve.py).

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1
    rank 1  .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1

Source: Zero Bubble, arXiv:2401.10241 (ZB-V).
"""

import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from penstock.schedule.alternating import alternating
from penstock.schedule.greedy import Result, Rules, Seconds, greedy, prefer, script
from penstock.schedule.improve import improve, steady_of
from penstock.schedule.orders import Action, IntArray, Kind, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import one_way, ranks_for, vee
from penstock.schedule.steady import steady_s

_PATIENCE = (0.5, 0.75, 1.0)  # of a W, before which F or I may come
_PARTS = (0.0, 0.75, 0.9, 1.0)  # of the seconds that a rank idles at most
_STARTS = 3  # orders that are improved


class _Next(NamedTuple):
    """The next micro-batch's action of a kind in a stage."""

    kind: Kind
    stage: int


def zb_v(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    seconds: Seconds | None = None,
) -> Schedule:
    """Return ZB-V for `seconds`, by default f = i = w; without `num_ranks`, two stages per rank.

    In a long run without a barrier (`steady_s`) no step takes longer than with the schedule that is
    made for f = i = w.

    Bubble, in seconds, for stages with f = i = w, free links, S = 2 R and M = R or M >= 2 R - 1:
    (R - 1) * f, the time until the last rank can start; no schedule has less.  For M >= 2 R - 1 all
    of it is before a rank's first action and after its last, so that a long run has none.  Every
    rank holds at most 2 R activations, each of one stage, so no more than the first rank of 1F1B
    does with stages of twice the size.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    placement = one_way(vee(num_stages, ranks), num_micro_batches)
    orders = _alike(num_stages, num_micro_batches, ranks)
    if seconds is not None:
        orders = _best(placement, ranks, seconds, orders)
    return Schedule(num_stages, num_micro_batches, orders, name=zb_v.__name__)


@functools.lru_cache(maxsize=64)  # asked for again for all seconds
def _alike(num_stages: int, num_micro_batches: int, num_ranks: int) -> Orders:
    """Return the orders for f = i = w."""
    placement = one_way(vee(num_stages, num_ranks), num_micro_batches)
    return _of_rules(placement, Seconds(), _rules(placement, num_ranks))[0].orders


def _best(placement: IntArray, num_ranks: int, seconds: Seconds, alike: Orders) -> Orders:
    """Return the orders that are made for `seconds`; `alike` are those for f = i = w."""
    known = _of_rules(placement, seconds, _rules(placement, num_ranks))
    work_s = np.zeros(num_ranks)
    np.add.at(work_s, placement, seconds.table(len(placement), split=True).sum(axis=0)[:, None])
    idle_s = known[0].step_s - float(work_s.max())
    known += _of_rules(placement, seconds, _again(placement, num_ranks, idle_s))
    known.append(Result(alike, _steady_s(alike, placement, seconds)))
    known.sort(key=lambda each: each.step_s)
    if len(placement) < 2 * num_ranks:
        return known[0].orders
    limit, shape = 2 * num_ranks, (len(placement), placement.shape[1])
    better = (improve(each, seconds, shape, limit, is_steady=True) for each in known[:_STARTS])
    return min(better, key=lambda each: each.step_s).orders


def _of_rules(placement: IntArray, seconds: Seconds, rules: Iterable[Rules]) -> list[Result]:
    """Return the orders of all rules, the shortest step of a long run first."""
    found = [greedy(placement, seconds, [each]) for each in rules]
    found.sort(key=lambda each: each.step_s)  # of equal ones the shorter step that drains
    steady = [Result(each.orders, _steady_s(each.orders, placement, seconds)) for each in found]
    return sorted(steady, key=lambda each: each.step_s)


def _steady_s(orders: Orders, placement: IntArray, seconds: Seconds) -> float:
    num_stages, num_micro_batches = placement.shape
    if num_stages < 2 * len(orders):  # ranks have unequal numbers of stages
        return steady_s(Schedule(num_stages, num_micro_batches, orders), seconds)
    return steady_of(orders, seconds, (num_stages, num_micro_batches))


def _rules(placement: IntArray, num_ranks: int) -> Iterator[Rules]:
    limit = np.full(num_ranks, 2 * num_ranks)
    given = _script(placement, num_ranks)
    for patience in (0.0, *_PATIENCE):
        yield Rules(given, limit, patience=patience, in_order=True)
    for kinds in ("FIW", "IFW"):
        yield Rules(prefer(kinds, placement.shape), limit)
    wave = alternating(placement, num_ranks)  # Hanayo's forwards and backwards
    yield Rules(script(wave, placement.shape), limit, in_order=True)


def _again(placement: IntArray, num_ranks: int, most_s: float) -> Iterator[Rules]:
    """Yield rules for ranks that may idle for a part of `most_s`, which one does anyway."""
    limit, given = np.full(num_ranks, 2 * num_ranks), _script(placement, num_ranks)
    for patience, part in itertools.product(_PATIENCE, _PARTS):
        yield Rules(given, limit, patience=patience, idle_s=part * most_s, in_order=True)


def _script(placement: IntArray, num_ranks: int) -> IntArray:
    orders = Orders.of(_order(rank, num_ranks, placement.shape) for rank in range(num_ranks))
    return script(orders, placement.shape)


def _order(rank: int, num_ranks: int, shape: tuple[int, int]) -> Iterator[Action]:
    """Yield F and I of a rank, on the stages that there are."""
    there, back = rank, 2 * num_ranks - 1 - rank
    f, g, i, j = _Next("F", there), _Next("F", back), _Next("I", there), _Next("I", back)
    begin = [f] * (2 * (num_ranks - rank) - 1) + [g, f] * rank + [g, j] * (num_ranks - rank)
    done = dict.fromkeys((f, g, i, j), 0)
    for each in itertools.chain(begin, [f, i, g, j] * shape[1], [i, j] * shape[1]):
        if done[each] < shape[1]:
            if each.stage < shape[0]:
                yield Action(each.kind, each.stage, done[each])
            done[each] += 1
