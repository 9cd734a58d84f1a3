"""Forward only: inference, every rank passes on one micro-batch after the other.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 F3 .  .
    rank 1  .  F0 F1 F2 F3 .
    rank 2  .  .  F0 F1 F2 F3

On fewer ranks, stage s is on rank s % R, which takes all micro-batches through one of its stages
before the next: so weights that are elsewhere come once for all of them.

Source: EdgePipe, arXiv:2110.14895.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange
from penstock.schedule.stage_placement import loop, ranks_for


def forward_only(
    num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Return the schedule without a backward, stage s on rank s % num_ranks; else one per rank.

    Bubble, in seconds, for equal stages and free links: (R - 1) * f, where M >= R.  No activation
    is held but what waits for the next stage.

    Raises:   ScheduleError: `num_ranks` is less than 1.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks or max(1, num_stages))
    m, home = np.arange(num_micro_batches), loop(num_stages, ranks)
    orders = arrange(
        [Row("F", stage, m, stage * num_micro_batches + m) for stage in stages]
        for stages in (np.flatnonzero(home == rank).tolist() for rank in range(ranks))
    )
    return Schedule(num_stages, num_micro_batches, orders, name=forward_only.__name__)
