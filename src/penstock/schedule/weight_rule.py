"""Weight rules: which version of the weights each action reads, and what that costs in copies.

Version v + 1 of a stage is made by U(stage, v); version 0 is there when a window starts.
A rule is a law, arithmetic on (stage, micro-batch) alone; a schedule must fit its rule.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import IntArray, excerpt
from penstock.schedule.play import FORWARD, UPDATE, Columns, columns_of

if TYPE_CHECKING:  # a schedule has a rule, so its file imports this one
    from penstock.schedule.schedule import Schedule

Number = TypeVar("Number", int, IntArray)


class Reads(NamedTuple, Generic[Number]):
    """The versions read by F, and by B (or I and W), and the step that the gradient enters."""

    forward: Number
    backward: Number
    step: Number


class Law(Protocol):
    """A function written in arithmetic, so that it takes numbers and arrays of numbers.

    The micro-batch counts over the whole window; the last argument is the number in one step.
    """

    def __call__(
        self, stage: Number, micro_batch: Number, num_micro_batches: int, /
    ) -> Reads[Number]: ...


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A law, and how many versions older than version 0 are kept from one window for the next.

    At the very start of training version -1 and those before it equal version 0.
    """

    name: str
    law: Law
    history: int = 0


def _synchronous(stage: Number, micro_batch: Number, num_micro_batches: int, /) -> Reads[Number]:
    step = micro_batch // num_micro_batches
    return Reads(step, step, step)


def _double_buffered(
    stage: Number, micro_batch: Number, num_micro_batches: int, /
) -> Reads[Number]:
    step = micro_batch // num_micro_batches
    return Reads(step - 1, step - 1, step)


SYNCHRONOUS = WeightRule("synchronous", _synchronous)
"""W(t+1) = update(W(t), gradient at W(t))."""

DOUBLE_BUFFERED = WeightRule("double_buffered", _double_buffered, history=1)
"""W(t+1) = update(W(t), gradient at W(t-1)): PipeDream-2BW, arXiv:2006.09503."""

WEIGHT_RULES = (SYNCHRONOUS, DOUBLE_BUFFERED)


@dataclass(frozen=True, slots=True, eq=False)
class VersionTable:
    """What a weight rule means for one schedule.  The arrays are [stage, micro-batch]."""

    forward: IntArray  # version read by F
    backward: IntArray  # version read by B, or by I and W
    step: IntArray  # step, counted in the window, whose update takes the gradient
    alive: tuple[int, ...]  # per stage, the greatest number of versions alive at once on a rank


def versions(schedule: "Schedule") -> VersionTable:
    """Return the versions read in `schedule`, and how many of each stage are alive at once.

    A version lives from its update to the last action that reads it.  The newest one always
    lives, and at the window's end the `history` before it.  An update that makes a version from
    one that nobody will read again writes it in place.

    Raises:   ScheduleError: the law names a version that is not there yet, or not any more.
    """
    rule, per_step = schedule.weight_rule, schedule.num_micro_batches
    shape = (schedule.num_stages, per_step * schedule.num_steps)
    stages, micro_batches = (np.arange(size, dtype=np.int64) for size in shape)
    reads = rule.law(stages[:, None], micro_batches[None, :], per_step)
    forward, backward, step = (np.broadcast_to(read, shape) for read in reads)
    if not np.array_equal(step, np.broadcast_to(micro_batches // per_step, shape)):
        raise _wrong_step(schedule, step)
    if not schedule.has_updates:
        return VersionTable(forward, backward, step, (1,) * schedule.num_stages)
    read = (np.ascontiguousarray(forward), np.ascontiguousarray(backward))
    alive, wrong = _walk(columns_of(schedule.orders), read, schedule.num_steps, rule.history)
    if wrong >= 0:
        raise _unavailable(schedule, int(wrong), read)
    return VersionTable(forward, backward, step, tuple(alive.tolist()))


@compiled
def _walk(
    columns: Columns, read: tuple[IntArray, IntArray], num_steps: int, history: int
) -> tuple[IntArray, int]:
    """Return the most versions alive per stage, and the first action without its version, or -1."""
    kinds, stages, numbers, offsets = columns
    num_stages = read[0].shape[0]
    # Version v of a stage stands at [stage, v + history].  What lies before the first action
    # of a rank belongs to a rank before it, and is not there.
    born = np.full((num_stages, history + num_steps + 1), -1)
    last = np.full((num_stages, history + num_steps + 1), -1)
    alive = np.zeros(num_stages, np.int64)
    for rank in range(len(offsets) - 1):
        start = offsets[rank]
        for index in range(start, offsets[rank + 1]):
            kind, stage, number = kinds[index], stages[index], numbers[index]
            version = number if kind == UPDATE else read[0 if kind == FORWARD else 1][stage, number]
            if version < -history or version > num_steps:
                return alive, index
            if version > 0 and born[stage, version + history] < start:
                return alive, index
            last[stage, version + history] = index
            if kind == UPDATE:
                born[stage, version + history + 1] = index
        for stage in range(num_stages):
            if born[stage, -1] >= start:
                most = _most_alive(born[stage], last[stage], start, history)
                alive[stage] = max(alive[stage], most)
    return alive, -1


@compiled
def _most_alive(born: IntArray, last: IntArray, start: int, history: int) -> int:
    """Return the most versions of a stage alive at once on the rank whose actions begin at `start`.

    A version is alive after action i where it was born at i or before and is read after i.
    """
    most, num_versions = 0, len(born)
    for at in range(num_versions):
        count = 0
        for version in range(num_versions):
            kept = version >= num_versions - 1 - history
            is_born = born[version] <= born[at] or version <= history
            if is_born and (kept or last[version] > max(born[at], start - 1)):
                count += 1
        most = max(most, count)
    return most


def _wrong_step(schedule: "Schedule", step: IntArray) -> ScheduleError:
    per_step = schedule.num_micro_batches
    own: IntArray = np.arange(step.shape[1], dtype=np.int64) // per_step
    stage, m = np.argwhere(step != own)[0].tolist()
    return ScheduleError(
        f"rule {schedule.weight_rule.name} puts the gradient of stage {stage}, micro-batch {m} "
        f"into step {step[stage, m]}, and the micro-batch is of step {own[m]}",
        hint=f"return micro_batch // num_micro_batches ({per_step} here) as the step",
    )


def _unavailable(
    schedule: "Schedule", index: int, read: tuple[IntArray, IntArray]
) -> ScheduleError:
    action, orders, rule = schedule.orders.action(index), schedule.orders, schedule.weight_rule
    kind, stage, number = action
    version = number if kind == "U" else int(read[0 if kind == "F" else 1][stage, number])
    rank = orders.rank_at(index)
    if 1 <= version <= schedule.num_steps:
        why = f"but U{stage}.{version - 1} makes it later"
        hint = f"move U{stage}.{version - 1} before {action} on rank {rank}"
    else:
        why = f"but there are only versions {-rule.history} to {schedule.num_steps}"
        hint = f"give rule {rule.name} a greater history, or another law"
    head = (
        f"rank {rank} cannot do {action}: rule {rule.name} needs version {version} of stage {stage}"
    )
    return ScheduleError(f"{head}, {why}\n{excerpt(orders, rank, index)}", hint=hint)
