"""List scheduling: for stages, links and sums that take unequal times, on any placement.

The best of a few greedy schedules, which prefer backwards, or forwards, or what has furthest
to go, messages and sums over replicas counted; and of 1F1B, GPipe, interleaved and breadth-first,
so that it never takes longer than these.

    S = 3, M = 4, two seconds for F and four for B of stage 1, else one and two:
    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  B0 -  .  .  .  .  B1 -  .  .  B2 -  .  .  B3 -
    rank 1  .  F0 -  F1 -  F2 -  B0 -  -  -  F3 -  B1 -  -  -  B2 -  -  -  B3 -  -  -  .  .
    rank 2  .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  .  F3 B3 -  .  .  .  .  .  .  .  .  .  .  .

Source: SPP, arXiv:2204.10562 (list scheduling of the micro-batches).
"""

from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.figures import peak_activations
from penstock.schedule.gpipe import gpipe
from penstock.schedule.greedy import (
    NO_LIMIT,
    WEIGHTS,
    Floats,
    Rules,
    Seconds,
    greedy,
    prefer,
    script,
)
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import IntArray
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import loop, one_way, ranks_for, wave

_PLACEMENTS: dict[str, Callable[[int, int], IntArray]] = {"loop": loop, "wave": wave}


def list_schedule(
    num_stages: int,
    num_micro_batches: int,
    *,
    num_ranks: int | None = None,
    placement: Literal["loop", "wave"] = "loop",
    seconds: Seconds | None = None,
    limit: int | None = None,
) -> Schedule:
    """Return a schedule made for `seconds`, by default f = i = w, stages placed by `placement`.

    Without `num_ranks` there is a rank for each stage.  No rank holds more than `limit`
    activations; without it, as many as there are.

    Raises:   ScheduleError: `num_ranks` is less than 1, `limit` less than the stages of a rank, or
              a time is negative.
    """
    num_ranks = ranks_for(num_stages, num_micro_batches, num_ranks, per_rank=1)
    ranks = one_way(_PLACEMENTS[placement](num_stages, num_ranks), num_micro_batches)
    times = Seconds() if seconds is None else seconds
    limits = np.full(num_ranks, NO_LIMIT if limit is None else limit)
    orders = greedy(ranks, times, list(_rules(ranks, times, limits)), split=False).orders
    return Schedule(num_stages, num_micro_batches, orders, name=list_schedule.__name__)


def _rules(ranks: IntArray, seconds: Seconds, limits: IntArray) -> Iterator[Rules]:
    num_stages, num_micro_batches = ranks.shape
    for made in _known(num_stages, num_micro_batches, len(limits)):
        if np.array_equal(made.ranks, ranks) and (peak_activations(made) <= limits).all():
            yield Rules(script(made.orders, ranks.shape), limits, in_order=True)
    far_first = np.argsort(np.argsort(-_left_s(seconds, num_stages), kind="stable"))
    longest = prefer("FIW", ranks.shape)
    by_way = far_first.reshape(2, num_stages, 1) * num_micro_batches
    longest[:WEIGHTS] = by_way + np.arange(num_micro_batches)
    for priority in (prefer("IFW", ranks.shape), prefer("FIW", ranks.shape), longest):
        yield Rules(priority, limits)


def _left_s(seconds: Seconds, num_stages: int) -> Floats:
    """Return the seconds to the end of the step from each stage's F on, then from its B on.

    That of a micro-batch's last action, or of some stage's sum.
    """
    forward_s, backward_s, _ = seconds.table(num_stages, split=False)
    (there_s, back_s), sums_s = seconds.links(num_stages)
    left = np.zeros((2, num_stages))
    for stage in range(num_stages):
        before = left[1, stage - 1] + back_s[stage - 1] if stage else 0.0
        left[1, stage] = backward_s[stage] + max(before, sums_s[stage])
    left[0, -1] = forward_s[-1] + left[1, -1]
    for stage in range(num_stages - 2, -1, -1):
        left[0, stage] = forward_s[stage] + there_s[stage] + left[0, stage + 1]
    return left.ravel()


def _known(num_stages: int, num_micro_batches: int, num_ranks: int) -> Iterator[Schedule]:
    if num_ranks == num_stages:
        yield one_f_one_b(num_stages, num_micro_batches)
        yield gpipe(num_stages, num_micro_batches)
    yield interleaved(num_stages, num_micro_batches, num_ranks=num_ranks)
    yield breadth_first(num_stages, num_micro_batches, num_ranks=num_ranks)
