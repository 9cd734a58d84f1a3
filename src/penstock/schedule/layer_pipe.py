"""LayerPipe: the two gradients of a stage as tasks of their own, the one for the weights retimed.

1F1B with every backward cut in two and one delay put between the halves: the gradient of the
input goes to the rank before at once, the next forward starts, and only then the gradient of the
weights is computed, so that no rank ever waits for it.

    S = 3, M = 4, one second per action:
    rank 0  F0 F1 F2 .  .  I0 F3 W0 I1 W1 .  I2 W2 .  I3 W3
    rank 1  .  F0 F1 .  I0 F2 W0 I1 F3 W1 I2 W2 .  I3 W3 .
    rank 2  .  .  F0 I0 F1 W0 I1 F2 W1 I2 F3 W2 I3 W3 .  .

Source: 000#3 LayerPipe, arXiv:2108.06629, with all tasks of a stage on one rank and a flush after
the last backward, so that the gradients are not delayed.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def layer_pipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the LayerPipe schedule, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + i), against
    (S - 1) * (f + i + w) for 1F1B, and never more than that for any stages.
    Rank r holds min(S - r + 1, M) activations, and no more than M.
    """
    orders = arrange(_rows(rank, num_stages, num_micro_batches) for rank in range(num_stages))
    return Schedule(num_stages, num_micro_batches, orders, name=layer_pipe.__name__)


def _rows(rank: int, num_stages: int, num_micro_batches: int) -> tuple[Row, ...]:
    warm_up = num_stages - rank
    m = np.arange(num_micro_batches)
    return (
        Row("I", rank, m, 3 * m),
        Row("F", rank, m, 3 * (m - warm_up) + 1),
        Row("W", rank, m, 3 * m + 2),
    )
