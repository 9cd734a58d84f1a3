"""Simulated: the exact step and the peak bytes of many assignments of one problem.

Those that have the same schedule are simulated side by side.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from bench.planners.line_kernel import Arrays, held_bytes, stage_prices
from bench.planners.problem import Assignment, Problem
from penstock.errors import PlanError
from penstock.schedule import KINDS, find
from penstock.schedule.greedy import Seconds
from penstock.schedule.list_schedule import list_schedule
from penstock.schedule.orders import B, F, W
from penstock.schedule.schedule import Schedule
from penstock.schedule.zb_greedy import zb_greedy
from penstock.search.transformer.partition_kernel import Floats, Longs
from penstock.simulate import Table, step_seconds, table_of
from penstock.units import format_bytes, format_seconds

_ROUNDED = 1e-12  # sums of bytes that round otherwise do not decide
MADE_FOR_SECONDS = {
    each.__name__: each for each in (list_schedule, zb_greedy)
}  # for the seconds that are


@dataclass(frozen=True, slots=True)
class Outcome:
    """An assignment, the seconds of its step, and for every group the bytes of its devices.

    bound_s        that no schedule beats: the work of some group, its sums, and the way there
    excess_bytes   that the fullest device would need more than it has; 0 where all fit
    """

    assignment: Assignment
    step_s: float
    bound_s: float
    peak_bytes: tuple[float, ...]
    excess_bytes: float

    @property
    def fits(self) -> bool:
        return self.excess_bytes == 0

    def __str__(self) -> str:
        """Return one line: "1.25 s, 10.0 GiB: one_f_one_b  0-3 on 0,1 | 4-5 on 2"."""
        lacks = "" if self.fits else f", {format_bytes(round(self.excess_bytes))} too much"
        peak = format_bytes(round(max(self.peak_bytes)))
        return f"{format_seconds(self.step_s)}, {peak}{lacks}: {self.assignment}"


class _Made(NamedTuple):
    """A schedule, ready to be simulated."""

    table: Table
    num_micro_batches: int
    ranks: Longs  # [stage]
    in_flight: Longs  # [rank, moment, stage]: activations held


def simulated(problem: Problem, assignments: Sequence[Assignment]) -> list[Outcome]:
    """Return the outcome of each assignment, in their order.

    Raises:   PlanError: a schedule that needs another number of groups, or puts a stage on
              several; stages that are not all layers.
    """
    arrays, count = problem.arrays(), problem.num_micro_batches
    alike: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for at, each in enumerate(assignments):
        alike[each.schedule, len(each.ends)].append(at)
    found: dict[int, Outcome] = {}
    for (name, stages), members in alike.items():
        own = [assignments[at] for at in members]
        if name in MADE_FOR_SECONDS:
            outcomes = [_outcomes(arrays, _made_for(arrays, one, count), [one])[0] for one in own]
        else:
            outcomes = _outcomes(arrays, _known(name, stages, count), own)
        found |= dict(zip(members, outcomes, strict=True))
    return [found[at] for at in range(len(assignments))]


def _outcomes(arrays: Arrays, made: _Made, assignments: Sequence[Assignment]) -> list[Outcome]:
    """Return the outcomes of assignments with one schedule."""
    prices = np.zeros((len(assignments), 3, len(made.ranks)))
    held = np.zeros((len(assignments), 2, len(made.in_flight)))
    for at, each in enumerate(assignments):
        _check(each, len(arrays.sent), len(made.in_flight))
        ends, groups = np.array(each.ends, np.int64), _flat(each)
        prices[at] = stage_prices(arrays, ends, made.ranks, groups)
        held[at] = held_bytes(arrays, ends, made.ranks, groups, made.in_flight)
    seconds = np.zeros((len(assignments), len(KINDS), len(made.ranks)))
    for kind, part in (("F", 1), ("B", 2), ("I", 1), ("W", 1)):
        seconds[:, KINDS.index(kind)] = part / 3 * prices[:, 0]
    seconds[:, KINDS.index("U")] = prices[:, 2]
    steps_s = step_seconds(made.table, seconds, prices[:, 1]).tolist()
    bounds_s = _bounds_s(prices, made).tolist()
    peak, room = held[:, 0], held[:, 1]
    fits = peak <= room * (1 + _ROUNDED)
    excess = np.where(fits, 0.0, peak - np.minimum(room, peak)).max(axis=1).tolist()
    peaks: list[list[float]] = peak.tolist()
    return [
        Outcome(each, steps_s[at], bounds_s[at], tuple(peaks[at]), excess[at])
        for at, each in enumerate(assignments)
    ]


def _bounds_s(prices: Floats, made: _Made) -> Floats:
    """Return a bound for each of prices [candidate, 3, stage]."""
    work_s, message_s, sum_s = prices[:, 0], prices[:, 1], prices[:, 2]
    arrives_s = np.cumsum(work_s / 3 + message_s, axis=1) - (work_s / 3 + message_s)
    bounds_s = np.zeros(len(prices))
    for rank in range(len(made.in_flight)):
        own = made.ranks == rank
        busy_s = made.num_micro_batches * work_s[:, own].sum(axis=1) + sum_s[:, own].sum(axis=1)
        bounds_s = np.maximum(bounds_s, arrives_s[:, own].min(axis=1) + busy_s)
    return bounds_s


def _check(assignment: Assignment, layers: int, ranks: int) -> None:
    """Raise where stages are not all layers, or groups not all ranks."""
    ends, groups = assignment.ends, len(assignment.groups)
    if ends[-1] != layers or groups != ranks:
        message = f"stages end before layers {ends}, on {groups} groups, by {assignment.schedule}"
        raise PlanError(message, hint=f"end before layer {layers}, and give {ranks} groups")


def _flat(assignment: Assignment) -> tuple[Longs, Longs]:
    """Return where each group begins in all devices, and these."""
    offsets = [0, *itertools.accumulate(map(len, assignment.groups))]
    devices = [device for group in assignment.groups for device in group]
    return np.array(offsets, np.int64), np.array(devices, np.int64)


@lru_cache(maxsize=256)
def _known(name: str, stages: int, count: int) -> _Made:
    return _made(find(name)(stages, count))


def _made(schedule: Schedule) -> _Made:
    if any(len(ranks) > 1 for ranks in schedule.stage_ranks) or schedule.has_updates:
        message = f"{schedule.name} puts a stage on several ranks, or updates before the end"
        raise PlanError(message, hint="take one_f_one_b, zb_h1, interleaved or another such")
    held = [_in_flight(schedule, rank) for rank in range(schedule.num_ranks)]
    in_flight = np.zeros((len(held), max(map(len, held)), schedule.num_stages), np.int64)
    for rank, moments in enumerate(held):
        in_flight[rank, : len(moments)] = moments
    ranks = schedule.ranks[:, 0].astype(np.int64)
    return _Made(table_of(schedule), schedule.num_micro_batches, ranks, in_flight)


def _in_flight(schedule: Schedule, rank: int) -> Longs:
    """Return the activations of each stage that a rank holds, at moments when it holds most."""
    orders = schedule.orders
    part = orders.slice_of(rank)
    change = np.zeros((part.stop - part.start, schedule.num_stages), np.int64)
    kinds = orders.kinds[part]
    step = (kinds == F).astype(np.int64) - np.isin(kinds, (B, W))
    change[np.arange(len(step)), orders.stages[part]] = step
    held = np.unique(np.cumsum(change, axis=0), axis=0)
    is_less = [bool(((held >= one).all(axis=1) & (held > one).any(axis=1)).any()) for one in held]
    return held[~np.array(is_less, np.bool_)]


def _made_for(arrays: Arrays, assignment: Assignment, count: int) -> _Made:
    """Return the schedule made for the seconds of an assignment, and for what its memory holds.

    No rank holds more activations than all ranks have room for; where not even one has, 1.
    """
    stages = len(assignment.ends)
    _check(assignment, len(arrays.sent), stages)
    ends, ranks = np.array(assignment.ends, np.int64), np.arange(stages)
    prices = stage_prices(arrays, ends, ranks, _flat(assignment))
    third: list[float] = (prices[0] / 3).tolist()
    message_s = float(prices[1, :-1].mean()) if stages > 1 else 0.0
    seconds = Seconds(third, third, third, message_s)
    bounds = np.array([0, *assignment.ends])
    room = np.array([arrays.memory[list(group)].min() for group in assignment.groups])
    one = np.diff(arrays.kept[bounds]) / [len(group) for group in assignment.groups]
    left = room - np.diff(arrays.states[bounds])
    limit = min(
        (int(each // b) for each, b in zip(left, one, strict=True) if b > 0 and each < b * count),
        default=count,
    )
    return _made(
        MADE_FOR_SECONDS[assignment.schedule](stages, count, seconds=seconds, limit=max(1, limit))
    )
