"""DualPipe and DualPipeV: from both ends at once, each forward beside a backward of the other end.

In DualPipe even micro-batches go down, stage s on rank s, and odd ones up, stage s on rank
R - 1 - s; DualPipeV folds one such half into a V, so that no stage exists twice.  Either way a
rank has two stages, `near` its end and `far`, and repeats F near, B far, F far, B near: what one
of them sends can travel while the other computes.  Only where a rank would idle is a backward cut
into I and W.

    DualPipe, S = 4, M = 8, one second for F, I and W, two for B:
    rank 0  F0 F2 F4 F1 I1 W1 F3 F6 B3 B3 F5 B0 B0 B5 B5 F7 .  B2 B2 B7 B7 I4 W4 I6 W6
    rank 1  .  F0 F1 F2 F3 F4 B1 B1 F5 B0 B0 F6 B3 B3 F7 B2 B2 B5 B5 B4 B4 I7 I6 W7 W6
    rank 2  .  F1 F0 F3 F2 F5 B0 B0 F4 B1 B1 F7 B2 B2 F6 B3 B3 B4 B4 B5 B5 I6 I7 W6 W7
    rank 3  F1 F3 F5 F0 I0 W0 F2 F7 B2 B2 F4 B1 B1 B4 B4 F6 .  B3 B3 B6 B6 I5 W5 I7 W7

The bubbles here are those of ranks that do one thing at a time.  DeepSeek's own count takes a
forward and a backward beside each other as one block, and gets (R - 1) * (F&B + B - 3 W) for the V.

Source: DeepSeek-V3, arXiv:2412.19437, and the README of github.com/deepseek-ai/DualPipe.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal

import numpy as np

from penstock.schedule.greedy import Rules, Seconds, greedy, prefer
from penstock.schedule.orders import Action, IntArray, Orders
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import loop, mirror, one_way, ranks_for, vee

Step = tuple[Literal["F", "B", "I", "W"], int]  # what; 0 for the near stage, 1 for the far one
Lane = tuple[int, range]  # a stage and its micro-batches

F_NEAR: Step = ("F", 0)
F_FAR: Step = ("F", 1)
B_NEAR: Step = ("B", 0)
B_FAR: Step = ("B", 1)
I_NEAR: Step = ("I", 0)
I_FAR: Step = ("I", 1)
WEIGHTS: Step = ("W", 0)  # of either stage


def dual_pipe(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return DualPipe on S ranks, micro-batch m going down if m is even, up if it is odd.

    Bubble, in seconds, for equal stages, free links, w <= i <= f <= b, S even, and M even and at
    least 2 S: (S / 2 - 1) * (f + i - w).  A rank holds at most S + 1 activations.
    For other sizes it is a greedy schedule with that limit.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_stages)
    placement = mirror(loop(num_stages, ranks), num_micro_batches, ranks)
    half, micro_batches = num_stages // 2, range(num_micro_batches)
    orders: Orders | list[list[Action]]
    if num_stages % 2 or num_micro_batches % 2 or num_micro_batches < 2 * num_stages:
        orders = _greedy(placement, num_stages + 1, ranks)
    else:
        orders = []
        for rank in range(ranks):
            lanes = (rank, micro_batches[::2]), (num_stages - 1 - rank, micro_batches[1::2])
            near, far = lanes if rank < half else lanes[::-1]
            place = min(rank, num_stages - 1 - rank)
            steps = _steps(half, place, num_micro_batches // 2)
            orders.append(_actions(steps, near, far))
    return Schedule(num_stages, num_micro_batches, Orders.of(orders), name=dual_pipe.__name__)


def dual_pipe_v(
    num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None
) -> Schedule:
    """Return DualPipeV; without `num_ranks`, two stages per rank.

    Bubble, in seconds, for equal stages, free links, w <= i <= f <= b, S = 2 R and M >= 2 R:
    (R - 1) * (f + i - w).  A rank holds at most 2 R + 1 activations, each of one stage.
    For other sizes it is a greedy schedule with that limit.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    home, micro_batches = vee(num_stages, ranks), range(num_micro_batches)
    orders: Orders | list[list[Action]]
    if num_stages < 2 * ranks or num_micro_batches < 2 * ranks:
        orders = _greedy(one_way(home, num_micro_batches), 2 * ranks + 1, ranks)
    else:
        orders = []
        for rank in range(ranks):
            near, far = (rank, micro_batches), (num_stages - 1 - rank, micro_batches)
            orders.append(_actions(_steps(ranks, rank, num_micro_batches), near, far))
    return Schedule(num_stages, num_micro_batches, Orders.of(orders), name=dual_pipe_v.__name__)


def _steps(size: int, place: int, number: int) -> Iterator[Step]:
    """Yield what the rank at `place` of `size`, counted from its end, does with `number` each."""
    inner, outer = size - place - 1, place + 1  # ranks nearer the turn, and the others
    yield from 2 * inner * [F_NEAR]
    yield from outer * [F_NEAR, F_FAR]
    yield from inner * [I_FAR, WEIGHTS, F_FAR]
    yield from (number - size - inner) * [F_NEAR, B_FAR, F_FAR, B_NEAR]
    yield from inner * [B_FAR, F_FAR, B_NEAR]
    yield from (outer * [B_FAR, B_NEAR])[:outer]
    yield from (outer * [I_FAR, I_NEAR])[outer:]
    yield from inner * [WEIGHTS, I_NEAR]
    yield from outer * [WEIGHTS]


def _actions(steps: Iterator[Step], near: Lane, far: Lane) -> list[Action]:
    """Return the steps with stages and micro-batches; a W belongs to the oldest I without one."""
    stages = near[0], far[0]
    forwards, backwards = ((iter(near[1]), iter(far[1])) for _ in range(2))
    split: deque[tuple[int, int]] = deque()
    actions: list[Action] = []
    for kind, lane in steps:
        match kind:
            case "F":
                place = stages[lane], next(forwards[lane])
            case "B":
                place = stages[lane], next(backwards[lane])
            case "I":
                place = stages[lane], next(backwards[lane])
                split.append(place)
            case "W":
                place = split.popleft()
        actions.append(Action(kind, *place))
    return actions


def _greedy(placement: IntArray, limit: int, num_ranks: int) -> Orders:
    limits = np.full(num_ranks, limit)
    rules = [Rules(prefer(kinds, placement.shape), limits) for kinds in ("FIW", "IFW")]
    return greedy(placement, Seconds(), rules).orders
