"""ZB-V: two stages per rank, in a V, so that no rank waits, with the memory of 1F1B.

Rank r has stages r and 2 R - 1 - r: the first rank has the loss, and needs no gradient from
another rank to begin its backwards.  The order is greedy, with the 2 R half stages for a
limit that the first rank of 1F1B holds as R whole ones.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 I3.0 F3.1 I3.1 I0.0 W3.0 I0.1 W0.0 W3.1 W0.1
    rank 1  .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 I2.1 I1.1 W2.0 W1.0 W2.1 W1.1

Source: 001#13 Zero Bubble, arXiv:2401.10241; the order is found greedily here.
"""

import numpy as np

from penstock.schedule.alternating import alternating
from penstock.schedule.greedy import Rules, Seconds, greedy, prefer, script
from penstock.schedule.placement import one_way, ranks_for, vee
from penstock.schedule.schedule import Schedule


def zb_v(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    seconds: Seconds | None = None,
) -> Schedule:
    """Return ZB-V for `seconds`, by default f = i = w; without `num_ranks`, two stages per rank.

    With `seconds` no step takes longer than with the schedule for f = i = w.

    Bubble, in seconds, for stages with f = i = w, free links, S = 2 R and M = R or M >= 2 R - 1:
    (R - 1) * f, the time until the last rank can start; no schedule has less.  Every rank
    holds at most 2 R activations, each of one stage, so no more than the first rank of 1F1B does
    with stages of twice the size.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    placement = one_way(vee(num_stages, ranks), num_micro_batches)
    limit = np.full(ranks, 2 * ranks)
    wave = script(alternating(placement, ranks), placement.shape)
    rules = [
        Rules(prefer("FIW", placement.shape), limit),
        Rules(prefer("IFW", placement.shape), limit),
        Rules(wave, limit, in_order=True),  # Hanayo's forwards and backwards
    ]
    if seconds is not None:  # no longer than with the schedule for equal stages
        alike = greedy(placement, Seconds(), rules).orders
        rules.append(Rules(script(alike, placement.shape), limit, in_order=True))
    orders = greedy(placement, seconds or Seconds(), rules).orders
    return Schedule(num_stages, num_micro_batches, orders, name=zb_v.__name__)
