"""PipeDream-2BW: 1F1B without a flush between steps, on the weights of one step ago.

After the last backward of a step a rank updates at once, while micro-batches of the next step
are on their way.  All of step t reads version t - 1, forward and backward, so that two versions
of the weights are enough:

    W(t+1) = update(W(t), gradient at W(t-1))

    S = 2, M = 2, two steps, one second for F and for U, two for B:
    rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 U0 F3 B2 B2 .  B3 B3 U1
    rank 1  .  F0 B0 B0 F1 B1 B1 U0 F2 B2 B2 F3 B3 B3 U1 .  .

A forward of step t waits for the update t - 2, so a rank runs no more than M + 1 forwards
ahead.  Where that is less than S, the ranks behind run ahead in proportion.

Source: arXiv:2006.09503, section 3.1.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange
from penstock.schedule.weight_rule import DOUBLE_BUFFERED


def double_buffered(num_stages: int, num_micro_batches: int, *, num_steps: int = 4) -> Schedule:
    """Return the 2BW schedule of a window of `num_steps` steps, one stage per rank.

    Bubble, in seconds, for equal stages, free links, u = 0 and M >= S - 1: (S - 1) * (f + b) in the
    whole window, as it fills and drains only once.  With fewer micro-batches it is longer.
    Rank r holds ceil((S - r) * min(S, M + 1) / S) activations, or all of a shorter window, and two
    versions of its weights.
    """
    orders = arrange(
        _rows(rank, num_stages, num_micro_batches, num_steps=num_steps)
        for rank in range(num_stages)
    )
    name = double_buffered.__name__
    return Schedule(num_stages, num_micro_batches, orders, num_steps, DOUBLE_BUFFERED, name)


def _rows(rank: int, num_stages: int, num_micro_batches: int, *, num_steps: int) -> tuple[Row, ...]:
    ahead = min(num_stages, num_micro_batches + 1)
    warm_up = -(-(num_stages - rank) * ahead // num_stages)
    m, step = np.arange(num_steps * num_micro_batches), np.arange(num_steps)
    last = (step + 1) * num_micro_batches - 1
    return (
        Row("B", rank, m, 3 * m),
        Row("U", rank, step, 3 * last + 1),
        Row("F", rank, m, 3 * (m - warm_up) + 2),
    )
