"""Breadth-first: several stages on each rank, and all micro-batches through one before the next.

Stage s lives on rank s % R.  A rank runs every micro-batch through its first stage, then through
its second, and so on; then the backwards, the last stage first.  The weights of a stage are
gathered once for all forwards and once for all backwards, and its gradients are complete, and may
be reduced, while the stages before it still work.

    S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 F2.0 F2.1 .    .    B2.0 B2.1 B0.0 B0.1
    rank 1  .    F1.0 F1.1 F3.0 F3.1 B3.0 B3.1 B1.0 B1.1 .

Source: Breadth-First, arXiv:2211.05953 (looped BFS); the backwards run in the order of the
micro-batches here.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange
from penstock.schedule.stage_placement import loop, ranks_for


def breadth_first(
    num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Return the breadth-first schedule, stage s on rank s % num_ranks; without it two per rank.

    Bubble, in seconds, for equal stages, free links, S = V * R and M >= R: (R - 1) * (f + b) with
    f and b of one stage, so 1 / V of that of GPipe on as many ranks.  For other S and M rank 0
    has ((S - 1) // R * max(0, R - M) + (S - 1) % R) * (f + b).
    A rank holds M activations of each of its stages.

    Raises:   ScheduleError: `num_ranks` is less than 1.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    m, home = np.arange(num_micro_batches), loop(num_stages, ranks)
    late = (2 * num_stages - 1) * num_micro_batches
    orders = arrange(
        [Row("F", stage, m, stage * num_micro_batches + m) for stage in stages]
        + [Row("B", stage, m, late - stage * num_micro_batches + m) for stage in stages]
        for stages in (np.flatnonzero(home == rank).tolist() for rank in range(ranks))
    )
    return Schedule(num_stages, num_micro_batches, orders, name=breadth_first.__name__)
