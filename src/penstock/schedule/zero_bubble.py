"""ZB-H1 and ZB-H2: 1F1B with every backward cut in two, the second half filling the bubbles.

In ZB-H1 rank r runs S - r forwards (warm-up), then repeats I, W, F (steady state), then what
is left (cool-down).  Its W trails its I by r micro-batches, so the rank that starts
last has work saved for the end.  No rank holds more than S activations.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 fills the gap before the first I as well: rank r runs 2 (S - r) - 1 forwards ahead, and its
W trails by 2 r.  Every rank then works without a pause from its first action to its last, each
a forward later than the rank before it.

    S = 3, M = 5, one second per action:
    rank 0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

Source: Zero Bubble, arXiv:2401.10241, section 2.1 (its B is our I).
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def zb_h1(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the ZB-H1 schedule, one stage per rank.

    Bubble, in seconds, for equal stages, free links, w <= min(f, i) and M >= S:
    (S - 1) * (f + i - w), against (S - 1) * (f + i + w) for 1F1B.  With fewer micro-batches there
    is less to save: (S - 1) * (f + i) - (min(S, M) - 1) * w.
    Every rank holds min(S, M) activations.
    """
    orders = arrange(_rows(rank, num_stages, num_micro_batches) for rank in range(num_stages))
    return Schedule(num_stages, num_micro_batches, orders, name=zb_h1.__name__)


def zb_h2(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the ZB-H2 schedule, one stage per rank; for M <= S it is ZB-H1.

    Bubble, in seconds, for equal stages, free links, w <= min(f, i) and M >= 2 S - 1:
    (S - 1) * max(f, f + i - 2 w).  The (S - 1) * f of it is the time until the last rank can
    start, and no schedule has less; between its own first and last action rank r idles
    (S - 1 - r) * max(0, f + i - 2 w), which is what the paper counts.
    Every rank holds at most min(2 S - 1, M) activations, one less than twice those of ZB-H1.
    """
    more = max(0, num_micro_batches - num_stages)
    orders = arrange(
        _rows(rank, num_stages, num_micro_batches, more=more) for rank in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, orders, name=zb_h2.__name__)


def _rows(rank: int, num_stages: int, num_micro_batches: int, *, more: int = 0) -> tuple[Row, ...]:
    behind = num_stages - rank
    warm_up, lag = behind + min(more, behind - 1), rank + min(more, rank)
    m = np.arange(num_micro_batches)
    return (
        Row("I", rank, m, 3 * m),
        Row("W", rank, m, 3 * (m + lag) + 1),
        Row("F", rank, m, 3 * (m - warm_up) + 2),
    )
