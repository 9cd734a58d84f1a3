"""ZB-H1: 1F1B with every backward cut in two, the second half filling the bubbles.

Rank r runs S - r forwards (warm-up), then repeats I, W, F (steady state), then what
is left (cool-down).  Its W trails its I by r micro-batches, so the rank that starts
last has work saved for the end.  No rank holds more than S activations.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

Source: arXiv:2401.10241, section 2.1 (its B is our I).
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def zb_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the ZB-H1 schedule, one stage per rank.

    Bubble, in seconds, for equal stages, free links, w <= min(f, i) and M >= S:
    (S - 1) * (f + i - w), against (S - 1) * (f + i + w) for 1F1B.  With less micro-batches there
    is less to save: (S - 1) * (f + i) - (min(S, M) - 1) * w.
    Every rank holds min(S, M) activations.
    """
    orders = arrange(_rows(rank, num_stages, num_micro_batches) for rank in range(num_stages))
    return Schedule(num_stages, num_micro_batches, orders, name=zb_h1.__name__)


def _rows(rank: int, num_stages: int, num_micro_batches: int) -> tuple[Row, ...]:
    warm_up, lag = num_stages - rank, rank
    m = np.arange(num_micro_batches)
    return (
        Row("I", rank, m, 3 * m),
        Row("W", rank, m, 3 * (m + lag) + 1),
        Row("F", rank, m, 3 * (m - warm_up) + 2),
    )
