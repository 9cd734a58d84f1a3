"""Schedules: the order of work on every rank.

>>> print(one_f_one_b(2, 3))
schedule one_f_one_b: stages 2, micro-batches 3, steps 1, weights synchronous
rank 0  F0.0 F0.1 B0.0 F0.2 B0.1 B0.2
rank 1  F1.0 B1.0 F1.1 B1.1 F1.2 B1.2
"""

import difflib
from typing import Protocol

from penstock.errors import ScheduleError
from penstock.schedule.asynchronous import ASYNCHRONOUS
from penstock.schedule.bitpipe import bitpipe
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.chimera import chimera
from penstock.schedule.controllable import v_half, v_min
from penstock.schedule.dapple import dapple
from penstock.schedule.double_buffered import double_buffered
from penstock.schedule.dual_pipe import dual_pipe, dual_pipe_v
from penstock.schedule.figures import (
    bubble,
    bubble_fraction,
    made_in_passing,
    num_messages,
    peak_activations,
    reads_alike,
    weight_copies,
)
from penstock.schedule.forward_only import forward_only
from penstock.schedule.gpipe import gpipe
from penstock.schedule.greedy import Seconds
from penstock.schedule.hanayo import hanayo
from penstock.schedule.interleaved import interleaved
from penstock.schedule.layer_pipe import layer_pipe
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.one_f_one_b import one_f_one_b
from penstock.schedule.orders import KINDS, Action, Kind, Orders, Row, arrange
from penstock.schedule.refine import refine
from penstock.schedule.schedule import Schedule
from penstock.schedule.steady import steady_bubble_fraction, steady_s
from penstock.schedule.two_bp import delay_weights, two_bp
from penstock.schedule.wave_search import found
from penstock.schedule.weight_rule import (
    DOUBLE_BUFFERED,
    SYNCHRONOUS,
    WEIGHT_RULES,
    Law,
    Reads,
    VersionTable,
    WeightRule,
    scaled,
    versions,
)
from penstock.schedule.zb_greedy import zb_greedy
from penstock.schedule.zb_v import zb_v
from penstock.schedule.zero_bubble import zb_h1, zb_h2

__all__ = [
    "DOUBLE_BUFFERED",
    "KINDS",
    "SCHEDULES",
    "SYNCHRONOUS",
    "WEIGHT_RULES",
    "WITH_LINKS",
    "Action",
    "Builder",
    "Kind",
    "Law",
    "Orders",
    "Reads",
    "Row",
    "Schedule",
    "Seconds",
    "VersionTable",
    "WeightRule",
    "arrange",
    "bitpipe",
    "breadth_first",
    "bubble",
    "bubble_fraction",
    "chimera",
    "dapple",
    "delay_weights",
    "double_buffered",
    "dual_pipe",
    "dual_pipe_v",
    "find",
    "forward_only",
    "found",
    "gpipe",
    "hanayo",
    "interleaved",
    "layer_pipe",
    "list_schedule",
    "made_in_passing",
    "num_messages",
    "one_f_one_b",
    "peak_activations",
    "reads_alike",
    "refine",
    "scaled",
    "steady_bubble_fraction",
    "steady_s",
    "two_bp",
    "v_half",
    "v_min",
    "versions",
    "weight_copies",
    "zb_greedy",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


class Builder(Protocol):
    """A function that builds a schedule for any number of stages and micro-batches, 1 or more."""

    __name__: str

    def __call__(self, num_stages: int, num_micro_batches: int) -> Schedule: ...


SCHEDULES: tuple[Builder, ...] = (
    gpipe,
    one_f_one_b,
    dapple,
    interleaved,
    breadth_first,
    chimera,
    bitpipe,
    hanayo,
    zb_h1,
    zb_h2,
    zb_v,
    zb_greedy,
    v_half,
    v_min,
    found,
    dual_pipe,
    dual_pipe_v,
    two_bp,
    layer_pipe,
    list_schedule,
    forward_only,
    double_buffered,
    *ASYNCHRONOUS,
)

WITH_LINKS: tuple[Builder, ...] = (list_schedule,)
"""Those made for seconds that also mind those of each link, and of sums over replicas."""


def find(name: str) -> Builder:
    """Return the built-in schedule of that name.

    Raises:   ScheduleError: there is none; the hint gives the closest name, if any, and all names.
    """
    for builder in SCHEDULES:
        if builder.__name__ == name:
            return builder
    names = [builder.__name__ for builder in SCHEDULES]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}? " if near else ""
    hint = f"{meant}there are: {', '.join(names)}"
    raise ScheduleError(f"there is no schedule {name!r}", hint=hint)
