"""Refine: the same work in the same order, each stage cut into units: stages of their own.

    stage 0 in two units, stage 1 in three
    rank 0  F0.0 B0.0       rank 0  F0.0 F1.0 B1.0 B0.0
    rank 1  F1.0 B1.0       rank 1  F2.0 F3.0 F4.0 B4.0 B3.0 B2.0

Where a rank did a stage it now does its units, one right after another: F in their order, B (and
I, and W) back, U of each.  What crosses between two of them stays on the rank and is no message.
So what a schedule gives is kept - its bubble, its messages, the versions that are read - and
whatever is decided stage by stage (what is repeated, gathered, summed) can be decided by unit.
What a stage has in far memory its units have there.
"""

from collections.abc import Sequence

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.far_words import moved
from penstock.schedule.orders import B, I, Orders, W
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import of_units

BACKWARD = (B, I, W)


def refine(schedule: Schedule, units: Sequence[int]) -> Schedule:
    """Return `schedule` with stage s cut into `units[s]` stages.

    A unit reads the versions that its stage reads, by a weight rule that says so (`of_units`).
    Raises:   ScheduleError: `units` is of another number of stages, or one of them is below 1.
    """
    counts = check_units(units)
    if len(counts) != schedule.num_stages:
        message = f"units are given for {len(counts)} of {schedule.num_stages} stages"
        raise ScheduleError(message, hint="give one number for each stage")
    if set(counts) == {1}:
        return schedule
    orders, ends = schedule.orders, np.cumsum(counts).tolist()
    starts = np.concatenate([[0], np.cumsum(np.array(counts)[orders.stages])])

    def place(rank: int, at: int) -> int:
        first = int(orders.offsets[rank])
        return int(starts[first + at] - starts[first])

    return Schedule(
        sum(counts),
        schedule.num_micro_batches,
        _in_units(orders, np.array(counts, np.int64)),
        schedule.num_steps,
        of_units(schedule.weight_rule, counts),
        f"{schedule.name}{words_of_units(counts)}" if schedule.name else "",
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


def words_of_units(units: Sequence[int]) -> str:
    """Return the suffix of a schedule's name whose stages are in units: " / units 4 4"."""
    return f" / units {' '.join(map(str, units))}"


def _in_units(orders: Orders, units: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Orders:
    """Return the orders with every action in units."""
    counts = units[orders.stages]
    ends = np.cumsum(counts)
    place = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)  # inside its action
    kinds, own = np.repeat(orders.kinds, counts), np.repeat(counts, counts)
    first = np.repeat((np.cumsum(units) - units)[orders.stages], counts)
    back = np.isin(kinds, BACKWARD)
    return Orders(
        kinds,
        (first + np.where(back, own - 1 - place, place)).astype(np.int32),
        np.repeat(orders.micro_batches, counts),
        np.concatenate([np.zeros(1, np.int64), ends])[orders.offsets],
    )
