"""ZB-greedy: zero bubble for given seconds, under a limit of memory, found greedily.

The best of a few greedy schedules, which differ in how far forwards run ahead of the backwards,
whether a rank prefers I or F, and whether it starts a W shortly before something better.  Where
that is not the shortest possible, neighbours on the critical path are swapped (improve.py);
for few micro-batches in the next best two as well.

    S = 3, M = 4, at most 3 activations, I takes two seconds, all else one:
    rank 0  F0 F1 F2 .  .  .  .  I0 I0 W0 F3 I1 I1 W1 I2 I2 W2 I3 I3 W3
    rank 1  .  F0 F1 .  .  I0 I0 F2 I1 I1 W0 F3 I2 I2 W1 I3 I3 W2 W3 .
    rank 2  .  .  F0 I0 I0 F1 I1 I1 F2 I2 I2 W0 F3 I3 I3 W1 W2 W3 .  .

Source: 001#13 Zero Bubble, arXiv:2401.10241 (automatic scheduling).
"""

from collections.abc import Iterator

import numpy as np

from penstock.schedule.figures import peak_activations
from penstock.schedule.greedy import Result, Rules, Seconds, greedy_few, prefer, script
from penstock.schedule.improve import improve, step_of
from penstock.schedule.orders import IntArray
from penstock.schedule.placement import loop, one_way, ranks_for
from penstock.schedule.schedule import Schedule
from penstock.schedule.zero_bubble import zb_h1, zb_h2

_STARTS = 3  # greedy schedules that are improved
_SMALL = 80  # pairs of stage and micro-batch: where there is time for it


def zb_greedy(
    num_stages: int,
    num_micro_batches: int,
    *,
    seconds: Seconds | None = None,
    limit: int | None = None,
) -> Schedule:
    """Return a schedule made for `seconds`, by default f = i = w, one stage per rank.

    No rank holds more than `limit` activations, by default S, as 1F1B does; with 2 S - 1 nearly all
    bubbles can go.  A step never takes longer than with ZB-H1, as far as the limit allows that,
    nor than with ZB-H2, nor than with the schedule that is made for f = i = w.

    Raises:   ScheduleError: `limit` is less than 1, or a time is negative.
    """
    most = num_stages if limit is None else limit
    shape = num_stages, num_micro_batches
    orders, step_s = best_of_rules(*shape, seconds or Seconds(), most)
    if seconds is not None:
        alike = best_of_rules(*shape, Seconds(), most).orders
        orders = alike if step_of(alike, seconds, shape) < step_s else orders
    return Schedule(*shape, orders, name=zb_greedy.__name__)


def best_of_rules(num_stages: int, num_micro_batches: int, seconds: Seconds, limit: int) -> Result:
    """Return the orders of `zb_greedy`, and the seconds that they take."""
    ranks_for(num_stages, num_micro_batches, num_stages)
    ranks = one_way(loop(num_stages, num_stages), num_micro_batches)
    most = _STARTS if ranks.size <= _SMALL else 1
    few = greedy_few(ranks, seconds, list(_rules(ranks, limit)), most)
    shape = num_stages, num_micro_batches
    return min((improve(each, seconds, shape, limit) for each in few), key=lambda best: best.step_s)


def _rules(ranks: IntArray, limit: int) -> Iterator[Rules]:
    num_stages, num_micro_batches = ranks.shape
    limits = np.full(num_stages, limit, np.int64)
    behind = np.arange(num_stages, 0, -1, dtype=np.int64)
    for more in sorted({0, 1, num_stages // 2, num_stages}):
        for kinds, patience in (("IFW", 0.0), ("IFW", 0.5), ("FIW", 0.0)):
            if kinds == "IFW" or more in (0, num_stages):
                yield Rules(prefer(kinds, ranks.shape), limits, behind + more, patience)
    for builder in (zb_h1, zb_h2):
        made = builder(num_stages, num_micro_batches)
        if max(peak_activations(made)) <= limit:
            for patience in (0.0, 1.0):
                given = script(made.orders, ranks.shape)
                yield Rules(given, limits, patience=patience, in_order=True)
