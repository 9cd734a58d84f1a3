"""GPipe: every rank runs all its forwards, then all its backwards.

    S = 3, M = 4, one second for F, two for B:
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .

Source: arXiv:1811.06965, section 2.3; the backwards run in the order of the micro-batches
here, so that gradients are summed in the same order as without a pipeline.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def gpipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the GPipe schedule, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + b).
    Every rank holds M activations.
    """
    m = np.arange(num_micro_batches)
    orders = arrange(
        (Row("F", rank, m, m), Row("B", rank, m, num_micro_batches + m))
        for rank in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, orders, name=gpipe.__name__)
