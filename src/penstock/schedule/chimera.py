"""Chimera: pipelines in opposite directions over the same ranks, each filling the other's bubbles.

Even micro-batches go down, stage s on rank s; odd ones up, stage s on rank S - 1 - s.  Every stage
lives on two ranks, whose gradients are summed.  Units of S micro-batches follow one another, and
since a rank alternates between F and B throughout, none of the forward doubling or backward
halving of the paper is needed to keep the ranks busy where one unit meets the next.

    S = 4, M = 4, one second for F, two for B:
    rank 0  F0 F2 .  F1 B1 B1 F3 B3 B3 .  B0 B0 .  .  B2 B2
    rank 1  .  F0 F1 F2 F3 .  B1 B1 B0 B0 B3 B3 B2 B2 .  .
    rank 2  .  F1 F0 F3 F2 .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 3  F1 F3 .  F0 B0 B0 F2 B2 B2 .  B1 B1 .  .  B3 B3

With k pairs of pipelines each pair begins S / k ranks after the one before: shorter waits, more
copies of the weights.

Source: Chimera, arXiv:2107.06925.
"""

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.alternating import both_ways
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import mirror, ranks_for


def chimera(num_stages: int, num_micro_batches: int, *, pipelines: int = 2) -> Schedule:
    """Return the Chimera schedule on S ranks, micro-batch m in pipeline m % pipelines.

    Bubble, in seconds, for equal stages, free links, S divisible by `pipelines` = 2 k and
    M by S: (S / k - 2) * max(f, b).  A rank then holds between S / 2 + 1 and S activations.
    For other sizes it is whichever is shorter for f = i = w, this or a greedy schedule.

    Raises:   ScheduleError: `pipelines` is not even, or less than 2.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_stages)
    if pipelines < 2 or pipelines % 2:
        raise ScheduleError(
            f"there are {pipelines} pipelines", hint="give 2, or another even number"
        )
    pair = np.arange(num_micro_batches) % pipelines // 2
    first = pair * num_stages // (pipelines // 2)
    placement = mirror(np.arange(num_stages), num_micro_batches, ranks)
    placement = (placement + np.where(np.arange(num_micro_batches) % 2, -first, first)) % ranks
    orders = both_ways(placement, ranks, directions=pipelines)
    return Schedule(num_stages, num_micro_batches, orders, name=chimera.__name__)
