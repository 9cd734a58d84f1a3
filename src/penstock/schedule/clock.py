"""Clock: who can start when, and who never can, where the order of every rank is given.

An action has a number, (row * S + stage) * M + micro-batch: row 0 for F, 1 for B or I, 2 for W; the
updates come last, stage * steps + step.  Besides the one before it on its rank it waits for one:

    F     F of the stage before
    B, I  B or I of the stage after, which is later than any F before it; at the last stage F
    W     its I
    U     a join, which is over when all its members have ended

and, if that one is on another rank, for a message.  Whatever plays orders goes through `run`: what
verifies them, what moves actions about in them, and the table of a schedule
(simulate/wait_table.py).
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.schedule.compiled import compiled
from penstock.schedule.orders import B, IntArray, Orders, U, W

Floats: TypeAlias = npt.NDArray[np.float64]
Ranks: TypeAlias = npt.NDArray[np.int32]
Numbers: TypeAlias = npt.NDArray[np.int32 | np.int64]

FORWARD, INPUT, WEIGHTS = range(3)  # rows; B stands where I does
ROWS = np.array([FORWARD, INPUT, INPUT, WEIGHTS, WEIGHTS + 1])  # by kind


class Joins(NamedTuple):
    """What updates wait for."""

    of: IntArray  # [place]: the join that the action there belongs to, or -1; empty: no joins
    left: IntArray  # [stage * steps + step]: members


class Clockwork(NamedTuple):
    """What does not change when the orders do."""

    homes: Ranks  # the rank of [stage, micro-batch]
    took_s: Floats  # [number]; or one for all
    message_s: float
    joins: Joins


class Log(NamedTuple):
    """What a run fills in.

    Rows stand after all that they wait for; there are none where they are not asked for.  Each
    member of a join but the first makes a row, which waits for all of them so far.
    """

    ends_s: Floats  # [number]: -1 for never; of F, B and I, and of W if there is room
    place: Ranks  # [row]: of the action; of a join, -1 - join
    previous: Ranks  # [row]: that of the action before it on its rank, or -1
    source: Ranks  # [row]: that of what it waits for on another rank, or the previous one
    last: Ranks  # [rank]: its last row, or -1


def clockwork(homes: Ranks, took_s: Floats, message_s: float = 0.0) -> Clockwork:
    """Return work without updates."""
    none, homes = np.empty(0, np.int64), homes.view()
    homes.setflags(write=False)  # as in a Schedule: the same machine code for both
    return Clockwork(homes, took_s, message_s, Joins(none, none))


def log_of(num_ends: int, num_rows: int = 0, num_ranks: int = 0) -> Log:
    """Return room for that many ends, and for that many rows of that many ranks."""
    place, previous, source = np.empty((3, num_rows), np.int32)
    return Log(np.empty(num_ends), place, previous, source, np.full(num_ranks, -1, np.int32))


def numbers_of(orders: Orders, shape: tuple[int, int], num_steps: int = 0) -> Numbers:
    """Return the number of every action in `orders`; `shape` is stages and micro-batches."""
    most = len(ROWS) * shape[0] * (shape[1] + num_steps)
    rows = ROWS.astype(np.int32 if most < 2**31 else np.int64)
    numbers: Numbers = np.take(rows, orders.kinds)
    numbers *= shape[0]
    numbers += orders.stages
    numbers *= shape[1]
    numbers += orders.micro_batches
    if num_steps:
        at = np.flatnonzero(orders.kinds == U)
        updates = orders.stages[at].astype(np.int64) * num_steps + orders.micro_batches[at]
        numbers[at] = (WEIGHTS + 1) * shape[0] * shape[1] + updates
    return numbers


def joins_of(orders: Orders, shape: tuple[int, int], num_steps: int) -> Joins:
    """Return the B and W that each update waits for, those of its stage and step."""
    none = np.empty(0, np.int64)
    if not num_steps:
        return Joins(none, none)
    of = orders.stages * num_steps + orders.micro_batches // (shape[1] // num_steps)
    of = np.where(np.isin(orders.kinds, (B, W)), of, -1).astype(np.int64)
    return Joins(of, np.bincount(of[of >= 0], minlength=shape[0] * num_steps))


def play(
    orders: Orders, ranks: Ranks, num_steps: int, seconds: tuple[float, ...]
) -> tuple[IntArray, Floats]:
    """Return where in the arrays every rank stops, and when, in seconds, its last action ends.

    `ranks[stage, micro_batch]` says where an action runs, `seconds[code]` how long (the code is
    the place in KINDS), `num_steps` how many steps end with a U, which waits for every B and W of
    its stage and step.  Links are free.  A rank that stops before the end of its order waits
    forever.
    """
    numbers = numbers_of(orders, ranks.shape, num_steps)
    took_s = np.array(seconds[:1])
    if len(set(seconds)) > 1:
        took_s = np.zeros((WEIGHTS + 1) * ranks.size + len(ranks) * num_steps)
        took_s[numbers] = np.array(seconds)[orders.kinds]
    work = Clockwork(ranks, took_s, 0.0, joins_of(orders, ranks.shape, num_steps))
    return run(numbers, orders.offsets, work, log_of(2 * ranks.size))


@compiled
def run(  # long: split up it takes three times as long
    numbers: Numbers, offsets: IntArray, work: Clockwork, log: Log
) -> tuple[IntArray, Floats]:
    """Return where every rank stops, and when its last action ends; fill in `log`.

    Ranks do one action each in turn, and one that waits has no turn until what it may wait for has
    ended.
    """
    homes, took_s, message_s, (joined, left) = work
    num_micro_batches = homes.shape[1]
    num_ranks, cells, same = len(offsets) - 1, homes.size, len(took_s) == 1
    by_cell, (ends_s, places, previous, sources, last_row) = homes.ravel(), log
    ends_s[:] = -1.0
    left, joint_s, joint = left.copy(), np.zeros(len(left)), np.full(len(left), -1)
    row_of = np.empty(2 * cells if len(places) > 0 else 0, np.int32)
    last_row[:], row = -1, -1
    at, clock_s = offsets[:-1].copy(), np.zeros(num_ranks)
    ring, has_turn, turn, last = np.arange(num_ranks), np.ones(num_ranks, np.bool_), 0, 0
    turns = num_ranks
    while turns > 0:
        rank = ring[turn]
        turn = turn + 1 if turn + 1 < num_ranks else 0
        turns -= 1
        has_turn[rank] = False
        place = at[rank]
        if place == offsets[rank + 1]:
            continue
        number, source, follower = numbers[place], -1, -1  # what it waits for; what waits for it
        if number < cells:
            source = max(number - num_micro_batches, -1)
            if number + num_micro_batches < cells:
                follower = number + num_micro_batches
        elif number < 2 * cells:
            source = number + num_micro_batches
            if source >= 2 * cells:
                source = number - cells
            if number - num_micro_batches >= cells:
                follower = number - num_micro_batches
        elif number < 3 * cells:
            source = number - cells
        start_s, is_sent = clock_s[rank], False
        if source >= 0:
            needed_s = ends_s[source]
            if needed_s < 0.0:
                continue
            home = by_cell[source - cells if source >= cells else source]
            is_sent = home != rank
            start_s = max(start_s, needed_s + message_s if is_sent else needed_s)
        elif number >= 3 * cells:
            if left[number - 3 * cells] > 0:
                continue
            start_s = max(start_s, joint_s[number - 3 * cells])
        end_s = start_s + took_s[0 if same else number]
        clock_s[rank] = end_s
        if number < len(ends_s):
            ends_s[number] = end_s
        at[rank] = place + 1
        if len(places) > 0:
            row += 1
            places[row], previous[row], sources[row] = place, last_row[rank], last_row[rank]
            if is_sent:
                sources[row] = row_of[source]
            elif number >= 3 * cells and joint[number - 3 * cells] >= 0:
                sources[row] = joint[number - 3 * cells]
            if number < 2 * cells:
                row_of[number] = row
            last_row[rank] = row
        has_turn[rank] = True
        ring[last] = rank
        last = last + 1 if last + 1 < num_ranks else 0
        turns += 1
        first, end = 0, 0
        if follower >= 0:
            first = by_cell[follower - cells if follower >= cells else follower]
            end = first + 1
        if len(joined) > 0 and joined[place] >= 0:
            join = joined[place]
            left[join] -= 1
            joint_s[join] = max(joint_s[join], end_s)
            if len(places) > 0 and joint[join] >= 0:
                row += 1
                places[row], previous[row], sources[row] = -1 - join, joint[join], last_row[rank]
            joint[join] = row
            if left[join] == 0:
                first, end = 0, num_ranks
        for other in range(first, end):
            if not has_turn[other]:
                has_turn[other] = True
                ring[last] = other
                last = last + 1 if last + 1 < num_ranks else 0
                turns += 1
    return at, clock_s
