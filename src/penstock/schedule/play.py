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

FORWARD, BACKWARD, INPUT, WEIGHTS, UPDATE = range(5)  # places in orders.KINDS


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
    num_stages, num_micro_batches = ranks.shape
    left = np.full((num_stages, num_updates), num_micro_batches // max(num_updates, 1), np.int64)
    return _play(columns_of(orders), ranks, left, np.array(seconds, np.float64))


@compiled
def _play(  # long: in pieces it takes three times as long
    columns: Columns, ranks: Ranks, left: Ints, seconds: Floats
) -> tuple[Ints, Floats]:
    """Let every rank run until it waits, and again when what it may wait for has ended."""
    kinds, stages, numbers, offsets = columns
    num_stages, num_micro_batches = ranks.shape
    num_ranks, num_updates = len(offsets) - 1, left.shape[1]
    forward_s, gradient_s = np.full(ranks.shape, -1.0), np.full(ranks.shape, -1.0)  # ends
    step_s = np.zeros(left.shape)
    at, clock_s = offsets[:-1].copy(), np.zeros(num_ranks)
    ready, is_ready, num_ready = np.arange(num_ranks), np.ones(num_ranks, np.bool_), num_ranks
    while num_ready > 0:
        num_ready -= 1
        rank = ready[num_ready]
        is_ready[rank] = False
        while at[rank] < offsets[rank + 1]:
            kind, stage, number = kinds[at[rank]], stages[at[rank]], numbers[at[rank]]
            start_s = clock_s[rank]
            if kind == FORWARD:
                needed_s = forward_s[stage - 1, number] if stage > 0 else 0.0
            elif kind == WEIGHTS:
                needed_s = gradient_s[stage, number]
            elif kind == UPDATE:
                needed_s = step_s[stage, number] if left[stage, number] == 0 else -1.0
            elif stage + 1 < num_stages:  # its gradient is later than any forward
                needed_s = gradient_s[stage + 1, number]
            else:
                needed_s = forward_s[stage, number]
            if needed_s < 0.0:
                break
            end_s = max(start_s, needed_s) + seconds[kind]
            clock_s[rank] = end_s
            at[rank] += 1
            first, last = 0, 0  # the ranks that may wait for this action
            if kind == FORWARD:
                forward_s[stage, number] = end_s
                if stage + 1 < num_stages:
                    first = ranks[stage + 1, number]
                    last = first + 1
            elif kind in (BACKWARD, INPUT):
                gradient_s[stage, number] = end_s
                if stage > 0:
                    first = ranks[stage - 1, number]
                    last = first + 1
            if num_updates > 0 and kind in (BACKWARD, WEIGHTS):
                step = number // (num_micro_batches // num_updates)
                left[stage, step] -= 1
                step_s[stage, step] = max(step_s[stage, step], end_s)
                if left[stage, step] == 0:
                    first, last = 0, num_ranks
            for other in range(first, last):
                if not is_ready[other]:
                    is_ready[other] = True
                    ready[num_ready] = other
                    num_ready += 1
    return at, clock_s
