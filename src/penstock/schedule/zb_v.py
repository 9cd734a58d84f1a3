"""ZB-V: two stages per rank, in a V, so that no rank waits, with the memory of 1F1B.

Rank r has stages r and 2 R - 1 - r: the first rank has the loss, and needs no gradient from
another rank to begin its backwards.  It does F and I in this order, as far as there are any; f
and i are those of stage r, F and I those of stage 2 R - 1 - r:

    2 (R - r) - 1 times f,  r times F f,  R - r times F I,  then f i F I again and again

W come where the rank would wait, or where it holds 2 R half stages, as the first rank of 1F1B holds
R whole ones.  If F, I and W take equally long, no rank waits between its first action and its
last.  For other seconds greedy orders are tried as well.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W3.1 W0.0 W0.1
    rank 1  .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1

Source: 001#13 Zero Bubble, arXiv:2401.10241 (ZB-V).
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.schedule.alternating import alternating
from penstock.schedule.greedy import Rules, Seconds, greedy, prefer, script
from penstock.schedule.orders import Action, Kind, Orders
from penstock.schedule.placement import one_way, ranks_for, vee
from penstock.schedule.schedule import Schedule
from penstock.schedule.steady import steady_s


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
    sizes, limit = (num_stages, num_micro_batches), np.full(ranks, 2 * ranks)
    pattern = Orders.of(_order(rank, ranks, placement.shape) for rank in range(ranks))
    wave = alternating(placement, ranks)  # Hanayo's forwards and backwards
    rules = [
        Rules(script(pattern, placement.shape), limit, in_order=True),
        Rules(prefer("FIW", placement.shape), limit),
        Rules(prefer("IFW", placement.shape), limit),
        Rules(script(wave, placement.shape), limit, in_order=True),
    ]

    def best(times: Seconds, known: list[Schedule]) -> Schedule:
        found = [greedy(placement, times, [each]) for each in rules]
        found.sort(key=lambda each: each.step_s)  # of equal ones the shorter step that drains
        made = [Schedule(*sizes, each.orders, name=zb_v.__name__) for each in found]
        return min(known + made, key=lambda each: steady_s(each, times))

    alike = best(Seconds(), [])
    return alike if seconds is None else best(seconds, [alike])


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
