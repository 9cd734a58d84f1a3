"""DAPPLE: 1F1B with a choice of how many forwards run ahead.

Rank r runs K forwards (warm-up), then alternates.  Policy "A" has K = S - r, and is 1F1B.  Policy
"B" has K = 2 (S - r) - 1: a message may then take as long as a forward and a backward together
before a rank waits for it, at the price of more activations.

    S = 3, M = 5, one second for F, two for B:
    rank 0  F0 F1 F2 F3 F4 .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
    rank 1  .  F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .

Source: 000#5 DAPPLE, arXiv:2007.01045.
"""

from typing import Literal

import numpy as np

from penstock.schedule.schedule import Row, Schedule, arrange

Policy = Literal["A", "B"]


def dapple(num_stages: int, num_micro_batches: int, *, policy: Policy = "B") -> Schedule:
    """Return DAPPLE's early backward schedule, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + b), whatever the policy.
    Rank r holds min(K, M) activations.
    """
    orders = arrange(
        _rows(rank, num_stages - rank, num_micro_batches, policy) for rank in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, orders, name=dapple.__name__)


def _rows(rank: int, behind: int, num_micro_batches: int, policy: Policy) -> tuple[Row, Row]:
    match policy:
        case "A":
            warm_up = behind
        case "B":
            warm_up = 2 * behind - 1
    m = np.arange(num_micro_batches)
    return Row("F", rank, m, 2 * (m - warm_up) + 1), Row("B", rank, m, 2 * m)
