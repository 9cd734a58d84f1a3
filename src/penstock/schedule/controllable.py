"""V-Half and V-Min: activations of half, and of a third, of 1F1B.

Each rank has one stage on the way there and one on the way back, and repeats a block of six
actions, F, I and W of both, shifted from rank to rank.  How many activations it holds is set by
their lifetime in this pattern.  On the way there an F comes `a` ticks after the previous rank's,
on the way back `b` ticks; an I comes `c` ticks later per rank on its way there, `d` on its way
back.  On the first rank a micro-batch then lives about R (a + b + c + d) ticks, and a new one comes
every six:

    V-Min   1, 1, 1, 1   R 4 / 6 stages, a third of the 2 R stages of 1F1B
    V-Half  1, 2, 1, 2   R 6 / 6 stages, half of them

Repeated as it stands this leaves ranks idle at both ends of the step, and between; every action is
then moved where there is room (justify.py), under the same number of activations L.  A step of M
micro-batches is left with 6 M + 6 R - 1 - 3 L seconds, for R >= 3 and M >= R: as short as the
shortest that the authors' own generator finds with as many activations, on 3 to 8 ranks.

    V-Min, S = 4, R = 2, M = 2, one second per action:
    rank 0  F0.0 F0.1 .    F3.0 I3.0 W3.0 F3.1 I0.0 I3.1 W0.0 W3.1 I0.1 W0.1
    rank 1  .    F1.0 F2.0 F1.1 F2.1 I2.0 I1.0 W2.0 W1.0 I2.1 I1.1 W2.1 W1.1

Source: "Pipeline Parallelism with Controllable Memory", arXiv:2405.15362; the ticks, and how the
ends are filled, are derived here.
"""

import itertools
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.schedule.justify import justify, orders_of
from penstock.schedule.schedule import Schedule
from penstock.schedule.stage_placement import ranks_for, vee

_Starts: TypeAlias = tuple[int, int, int]


class _Legs(NamedTuple):
    """Ticks from a rank to the next one, on the four legs of a micro-batch."""

    forward_there: int
    forward_back: int
    input_there: int
    input_back: int


def v_half(num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return V-Half; without `num_ranks`, two stages per rank.

    For S = 2 R a rank holds at most R + 1 activations, or R + 2 if R is even, each of one stage:
    half of what 1F1B holds with stages of twice the size.  Bubble, in seconds, for stages with
    f = i = w, free links and M >= R: (3 R - 7 + 3 (R % 2)) * f for R >= 3, against 6 (R - 1) * f
    for that 1F1B.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    return _repeated(_Legs(1, 2, 1, 2), num_stages, num_micro_batches, ranks, v_half.__name__)


def v_min(num_stages: int, num_micro_batches: int, *, num_ranks: int | None = None) -> Schedule:
    """Return V-Min; without `num_ranks`, two stages per rank.

    For S = 2 R a rank holds at most 2 * ((R + 4) // 3) activations, each of one stage: a third of
    what 1F1B holds with stages of twice the size, and up to 8 / 3 more.  Bubble, in seconds, for
    stages with f = i = w, free links and M >= R: (6 R - 1 - 6 ((R + 4) // 3)) * f for R >= 3,
    against 6 (R - 1) * f for that 1F1B.

    Raises:   ScheduleError: `num_ranks` is less than 1, or there are more than two stages per rank.
    """
    ranks = ranks_for(num_stages, num_micro_batches, num_ranks)
    return _repeated(_Legs(1, 1, 1, 1), num_stages, num_micro_batches, ranks, v_min.__name__)


def _repeated(
    steps: _Legs, num_stages: int, num_micro_batches: int, num_ranks: int, name: str
) -> Schedule:
    homes, starts = vee(num_stages, num_ranks), _starts(steps, num_ranks)
    blocks = np.array([_block(steps, starts, rank) for rank in range(num_ranks)])
    first = np.zeros((3, 2 * num_ranks), np.int64)
    for kind in range(3):  # there on rank 0, 1, ..., then back
        there, back = (kind * 2 + (kind > 0), kind * 2 + (kind == 0))
        first[kind] = np.concatenate([blocks[:, there], blocks[::-1, back]])
    pattern = first[:, :num_stages, None] + 6 * np.arange(num_micro_batches)
    held = max(_held(block) for block in blocks.tolist())
    ticks = justify(pattern, homes, held)
    orders = orders_of(ticks, homes, num_ranks)
    return Schedule(num_stages, num_micro_batches, orders, name=name)


@lru_cache
def _starts(steps: _Legs, num_ranks: int) -> _Starts:
    """Return the ticks of rank 0 on the last three legs that need the fewest activations.

    Among these, those with the shortest wait between the last F and the first I, then the first.
    """
    there, back = sum(steps[:2]) * (num_ranks - 1), sum(steps[2:]) * (num_ranks - 1)
    best: list[tuple[int, int, _Starts]] = []
    for wait, more, most in itertools.product(range(1, 7), repeat=3):
        turn = there + wait + more
        starts = (there + wait, turn, turn + back + most)
        blocks = [_block(steps, starts, rank) for rank in range(num_ranks)]
        if all(blocks):
            best.append((max(_held(each) for each in blocks if each), more, starts))
    return min(best)[2]


def _held(block: tuple[int, ...]) -> int:
    """Return the most activations held by a rank that repeats the block forever."""
    begins, ends = block[:2], block[4:]
    return max(
        sum((now - begin) // 6 for begin in begins) - sum((now - 1 - end) // 6 for end in ends)
        for now in range(6)
    )


def _block(steps: _Legs, starts: _Starts, rank: int) -> tuple[int, ...] | None:
    """Return the ticks of `_KINDS` on a rank; None if two of them coincide, modulo the block.

    The W stand where the others leave room.
    """
    a, b, c, d = steps
    back, turn, end = starts
    ticks = (a * rank, back - b * rank, turn + c * rank, end - d * rank)
    free = set(range(6)) - {tick % 6 for tick in ticks}
    if len(free) > 2:
        return None
    ways = itertools.permutations(free)
    waits = ([(at - i) % 6 for at, i in zip(way, ticks[2:], strict=True)] for way in ways)
    first, second = min(waits, key=sum)
    return (*ticks, ticks[2] + first, ticks[3] + second)
