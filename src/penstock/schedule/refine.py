"""Refine: the same work in the same order, each stage cut into units: stages of their own.

    stage 0 in two units, stage 1 in three
    rank 0  F0.0 B0.0       rank 0  F0.0 F1.0 B1.0 B0.0
    rank 1  F1.0 B1.0       rank 1  F2.0 F3.0 F4.0 B4.0 B3.0 B2.0

Where a rank did a stage it now does its units, one right after another: F in their order, B (and
I, and W) back, U of each.  What crosses between two of them stays on the rank and is no message.
So what a schedule gives is kept - its bubble, its messages, the versions that are read - and
whatever is decided stage by stage (what is repeated, gathered, summed) can be decided by unit.
What a stage has in far memory its units have there.

Woven, a rank does two actions of different micro-batches in turn, a unit of one, a unit of the
other, so that one computes while what the other made is collected:

    rank 0  F0.0 B0.0 F0.1 B0.1       units 2, woven  F0.0 F1.0 (B1.0 F0.1) (B0.0 F1.1) B1.1 B0.1

Source:  the all-to-all of one micro-batch beside the compute of another, forward and backward:
         DualPipe, arXiv:2412.19437, section 3.2.1.
"""

from collections.abc import Sequence

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.far_words import moved
from penstock.schedule.orders import B, I, Orders, U, W
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import of_units

BACKWARD = (B, I, W)


def refine(schedule: Schedule, units: Sequence[int], *, woven: bool = False) -> Schedule:
    """Return `schedule` with stage s cut into `units[s]` stages, or also woven.

    A unit reads the versions that its stage reads, by a weight rule that says so (`of_units`).
    Raises:   ScheduleError: `units` is of another number of stages, or one of them is below 1; it
              is woven, and has several ranks or copies to far memory.
    """
    counts = check_units(units)
    if len(counts) != schedule.num_stages:
        message = f"units are given for {len(counts)} of {schedule.num_stages} stages"
        raise ScheduleError(message, hint="give one number for each stage")
    if set(counts) == {1}:
        return schedule
    if woven and (schedule.num_ranks > 1 or schedule.far):
        has = f"{schedule.num_ranks} ranks" if schedule.num_ranks > 1 else "copies to far memory"
        message = f"{schedule.name or 'a written schedule'} has {has}, and is to be woven"
        raise ScheduleError(message, hint="leave out woven")
    orders, ends = schedule.orders, np.cumsum(counts).tolist()
    starts = np.concatenate([[0], np.cumsum(np.array(counts)[orders.stages])])

    def place(rank: int, at: int) -> int:
        first = int(orders.offsets[rank])
        return int(starts[first + at] - starts[first])

    return Schedule(
        sum(counts),
        schedule.num_micro_batches,
        _in_units(orders, np.array(counts, np.int64), woven=woven),
        schedule.num_steps,
        of_units(schedule.weight_rule, counts),
        f"{schedule.name}{words_of_units(counts, woven=woven)}" if schedule.name else "",
        schedule.together,
        moved(
            schedule.far, place, [range(end - n, end) for n, end in zip(counts, ends, strict=True)]
        ),
    )


def check_units(units: Sequence[int]) -> tuple[int, ...]:
    """Return `units` as a tuple.

    Raises:   ScheduleError: there is none, or one of them is below 1.
    """
    if min(units, default=0) < 1:
        message = f"units are {' '.join(map(str, units)) or 'not given'}"
        raise ScheduleError(message, hint="give 1 or more for each stage")
    return tuple(int(count) for count in units)


def words_of_units(units: Sequence[int], *, woven: bool = False) -> str:
    """Return the suffix of a schedule's name whose stages are in units: " / units 4 4"."""
    return f" / units {' '.join(map(str, units))}{' woven' if woven else ''}"


def _pairs(orders: Orders) -> list[tuple[int, int]]:
    """Return for each action its pair's number, and whether it is the second of it."""
    kinds, numbers = orders.kinds.tolist(), orders.micro_batches.tolist()
    found: list[tuple[int, int]] = []
    while (at := len(found)) < len(kinds):
        after = at + 1
        paired = after < len(kinds) and U not in kinds[at : after + 1]
        paired = paired and numbers[at] != numbers[after]
        found += [(at, 0), (at, 1)] if paired else [(at, 0)]
    return found


def _in_units(
    orders: Orders, units: np.ndarray[tuple[int], np.dtype[np.int64]], *, woven: bool
) -> Orders:
    """Return the orders with every action in units; woven: those of pairs in turn."""
    counts = units[orders.stages]
    ends = np.cumsum(counts)
    place = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)  # inside its action
    kinds, own = np.repeat(orders.kinds, counts), np.repeat(counts, counts)
    first = np.repeat((np.cumsum(units) - units)[orders.stages], counts)
    back = np.isin(kinds, BACKWARD)
    stages = (first + np.where(back, own - 1 - place, place)).astype(np.int32)
    numbers, by = np.repeat(orders.micro_batches, counts), np.arange(len(kinds))
    if woven:
        pair, second = np.repeat(np.array(_pairs(orders), np.int64), counts, axis=0).T
        by = np.lexsort((second, place, pair))
    offsets = np.concatenate([np.zeros(1, np.int64), ends])[orders.offsets]
    return Orders(kinds[by], stages[by], numbers[by], offsets)
