"""Schedules: the order of work on every rank.

>>> print(one_f_one_b(2, 3))
schedule one_f_one_b: stages 2, micro-batches 3, steps 1, weights synchronous
rank 0  F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
rank 1  F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
"""

import difflib
from typing import Protocol

from penstock.errors import ScheduleError
from penstock.schedule.double_buffered import double_buffered
from penstock.schedule.figures import bubble, bubble_fraction, peak_activations
from penstock.schedule.gpipe import gpipe
from penstock.schedule.interleaved import interleaved
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import KINDS, Action, Kind, Orders, Row, arrange
from penstock.schedule.schedule import Schedule
from penstock.schedule.weight_rule import (
    DOUBLE_BUFFERED,
    SYNCHRONOUS,
    WEIGHT_RULES,
    Law,
    Reads,
    VersionTable,
    WeightRule,
    versions,
)
from penstock.schedule.zero_bubble import zb_h1

__all__ = [
    "DOUBLE_BUFFERED",
    "KINDS",
    "SCHEDULES",
    "SYNCHRONOUS",
    "WEIGHT_RULES",
    "Action",
    "Builder",
    "Kind",
    "Law",
    "Orders",
    "Reads",
    "Row",
    "Schedule",
    "VersionTable",
    "WeightRule",
    "arrange",
    "bubble",
    "bubble_fraction",
    "double_buffered",
    "find",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "peak_activations",
    "versions",
    "zb_h1",
]


class Builder(Protocol):
    """A function that builds a schedule for any number of stages and micro-batches, 1 or more."""

    __name__: str

    def __call__(self, num_stages: int, num_micro_batches: int) -> Schedule: ...


SCHEDULES: tuple[Builder, ...] = (gpipe, one_f_one_b, interleaved, zb_h1, double_buffered)


def find(name: str) -> Builder:
    """Return the built-in schedule of that name.

    Raises:   ScheduleError: there is none; the hint gives the nearest name, if any, and all names.
    """
    for builder in SCHEDULES:
        if builder.__name__ == name:
            return builder
    names = [builder.__name__ for builder in SCHEDULES]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}? " if near else ""
    hint = f"{meant}there are: {', '.join(names)}"
    raise ScheduleError(f"there is no schedule {name!r}", hint=hint)
