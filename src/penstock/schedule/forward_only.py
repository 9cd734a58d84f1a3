"""Forward only: inference, every rank passes on one micro-batch after the other.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 F3 .  .
    rank 1  .  F0 F1 F2 F3 .
    rank 2  .  .  F0 F1 F2 F3

Source: EdgePipe, arXiv:2110.14895.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def forward_only(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the schedule without a backward, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * f.  No activation is held.
    """
    m = np.arange(num_micro_batches)
    orders = arrange((Row("F", rank, m, m),) for rank in range(num_stages))
    return Schedule(num_stages, num_micro_batches, orders, name=forward_only.__name__)
