"""DAPPLE: 1F1B with a choice of how many forwards run ahead.

Rank r runs K forwards (warm-up), then alternates.  Policy "A" has K = S - r, and is 1F1B.  Policy
"B" has K = 2 (S - r) - 1: a message may then take as long as a forward and a backward together
before a rank waits for it, at the price of more activations.  K is never more than fit: `limit`.

    S = 3, M = 5, one second for F, two for B:
    rank 0  F0 F1 F2 F3 F4 .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3 .  B4 B4
    rank 1  .  F0 F1 F2 .  B0 B0 F3 B1 B1 F4 B2 B2 .  B3 B3 .  B4 B4 .  .
    rank 2  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 F4 B4 B4 .  .  .  .

Source: 000#5 DAPPLE, arXiv:2007.01045.
"""

from typing import Literal

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.schedule import Row, Schedule, arrange

Policy = Literal["A", "B"]


def dapple(
    num_stages: int, num_micro_batches: int, *, policy: Policy = "B", limit: int | None = None
) -> Schedule:
    """Return DAPPLE's early backward schedule, one stage per rank.

    Bubble, in seconds, for equal stages and free links: (S - 1) * (f + b), whatever the policy,
    where `limit` is S or more.  Rank r holds min(K, limit, M) activations.

    Raises:   ScheduleError: `limit` is less than 1.
    """
    if limit is not None and limit < 1:
        raise ScheduleError(f"the limit is {limit} activations", hint="give 1 or more")
    most = num_micro_batches if limit is None else limit
    orders = arrange(
        _rows(rank, min(most, _warm_up(num_stages - rank, policy)), num_micro_batches)
        for rank in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, orders, name=dapple.__name__)


def _warm_up(behind: int, policy: Policy) -> int:
    match policy:
        case "A":
            return behind
        case "B":
            return 2 * behind - 1


def _rows(rank: int, warm_up: int, num_micro_batches: int) -> tuple[Row, Row]:
    m = np.arange(num_micro_batches)
    return Row("F", rank, m, 2 * (m - warm_up) + 1), Row("B", rank, m, 2 * m)
