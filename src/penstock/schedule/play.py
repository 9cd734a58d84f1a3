"""Play a schedule on a clock with free links: who can start when, and who never can.

In a chain of stages F waits for F of the stage before; B and I wait for their own F and
for B or I of the stage after; W waits for its I; U waits for every B and W of its step.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.compiled import compiled
from penstock.schedule.orders import Orders

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Ranks: TypeAlias = npt.NDArray[np.int32]
Columns: TypeAlias = tuple[npt.NDArray[np.uint8], Ranks, Ranks, Ints]
# When F, and B or I, of [stage, micro-batch] ended, -1 before; of [stage, step] the
# backwards that are left, and when the last one ended.
Progress: TypeAlias = tuple[Floats, Floats, Ints, Floats]

FORWARD, BACKWARD, INPUT, WEIGHTS, UPDATE = range(5)  # places in orders.KINDS
_ALL = -2


def columns_of(orders: Orders) -> Columns:
    """Return the arrays of `orders` as a compiled loop takes them."""
    return orders.kinds, orders.stages, orders.micro_batches, orders.offsets


def play(
    orders: Orders, ranks: Ranks, num_updates: int, *, seconds: tuple[float, ...]
) -> tuple[Ints, Floats]:
    """Return where in the arrays every rank stops, and when, in seconds, its last action ends.

    `ranks[stage, micro_batch]` says where an action runs, `seconds[code]` how long (the code is
    the place in KINDS), `num_updates` how many steps end with a U.  A rank that stops before the
    end of its order waits for ever.
    """
    per_step = ranks.shape[1] // max(num_updates, 1)
    progress: Progress = (
        np.full(ranks.shape, -1.0),
        np.full(ranks.shape, -1.0),
        np.full((ranks.shape[0], num_updates), per_step, np.int64),
        np.zeros((ranks.shape[0], num_updates)),
    )
    return _play(columns_of(orders), ranks, progress, np.array(seconds, np.float64))


@compiled
def _start_s(action: tuple[int, int, int], progress: Progress) -> float:
    """Return when the last thing that an action waits for ended, or -1 where one has not."""
    kind, stage, micro_batch = action
    forward, gradient, left, step_end = progress
    if kind == FORWARD:
        return 0.0 if stage == 0 else forward[stage - 1, micro_batch]
    if kind == WEIGHTS:
        return gradient[stage, micro_batch]
    if kind == UPDATE:
        return -1.0 if left[stage, micro_batch] > 0 else step_end[stage, micro_batch]
    own = forward[stage, micro_batch]
    if own < 0.0 or stage == forward.shape[0] - 1:
        return own
    later = gradient[stage + 1, micro_batch]
    return max(own, later) if later >= 0.0 else -1.0


@compiled
def _end(action: tuple[int, int, int], end_s: float, progress: Progress) -> int:
    """Note that an action ended; return the stage that may wait for it, -1 for none, -2 for any."""
    kind, stage, micro_batch = action
    forward, gradient, left, step_end = progress
    num_stages, num_micro_batches = forward.shape
    if kind == FORWARD:
        forward[stage, micro_batch] = end_s
        return stage + 1 if stage + 1 < num_stages else -1
    if kind == BACKWARD or kind == INPUT:
        gradient[stage, micro_batch] = end_s
    if (kind == BACKWARD or kind == WEIGHTS) and left.shape[1] > 0:
        step = micro_batch // (num_micro_batches // left.shape[1])
        left[stage, step] -= 1
        step_end[stage, step] = max(step_end[stage, step], end_s)
        if left[stage, step] == 0:
            return _ALL
    return stage - 1 if kind == BACKWARD or kind == INPUT else -1


@compiled
def _play(columns: Columns, ranks: Ranks, progress: Progress, seconds: Floats) -> tuple[Ints, Floats]:
    kinds, stages, micro_batches, offsets = columns
    num_ranks = len(offsets) - 1
    at, clock_s = offsets[:-1].copy(), np.zeros(num_ranks)
    ready, is_ready, num_ready = np.arange(num_ranks), np.ones(num_ranks, np.bool_), num_ranks
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        is_ready[rank] = False
        while at[rank] < offsets[rank + 1]:
            index = at[rank]
            action = (int(kinds[index]), int(stages[index]), int(micro_batches[index]))
            start_s = _start_s(action, progress)
            if start_s < 0.0:
                break
            clock_s[rank] = max(clock_s[rank], start_s) + seconds[action[0]]
            at[rank] += 1
            waiting = _end(action, clock_s[rank], progress)
            if waiting == _ALL:
                first, last = 0, num_ranks
            elif waiting >= 0:
                first = int(ranks[waiting, action[2]])
                last = first + 1
            else:
                continue
            for other in range(first, last):
                if not is_ready[other] and other != rank:
                    is_ready[other] = True
                    ready[num_ready] = other
                    num_ready += 1
    return at, clock_s
