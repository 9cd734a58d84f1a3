"""1F1B: every rank runs just enough forwards ahead, then a backward for each forward.

Rank r runs S - r forwards (warm-up), then alternates (steady state): the forward of a
micro-batch follows the backward of the one S - r before it.

    S = 3, M = 4, one second for F, two for B:
    rank 0  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3
    rank 1  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .

Source: arXiv:1806.03377, section 3.2, with a flush after the last backward.
"""

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange


def one_f_one_b(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the 1F1B schedule, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + b).
    Rank r holds min(S - r, M) activations.
    """
    orders = arrange(_rows(rank, num_stages, num_micro_batches) for rank in range(num_stages))
    return Schedule(num_stages, num_micro_batches, orders, name=one_f_one_b.__name__)


def _rows(rank: int, num_stages: int, num_micro_batches: int) -> tuple[Row, Row]:
    warm_up = num_stages - rank
    m = np.arange(num_micro_batches)
    return Row("F", rank, m, 2 * (m - warm_up) + 1), Row("B", rank, m, 2 * m)
