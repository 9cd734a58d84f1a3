"""Adapt: the number of micro-batches, chosen anew when the links of a pipeline change.

The batch stays what it was: with M micro-batches, each has batch / M samples, and a stage takes

    call_s + samples * (forward_s, input_s, or weights_s; B: input_s + weights_s)

for F, I, W and B of one.  Every M that divides the batch and fits the memory is simulated exactly
(simulate/batch.py) under every schedule that may be taken, and so is the setting there is.  The
shortest step is taken, so that it is never longer than by staying.

A sample may be a micro-batch of the job: then batch / M of them are joined (docs/plan.md).

Ignores:  what messages cost beyond latency and bytes; sums over replicas; updates; the seconds of
          changing over.
Source:   DeepCEE, SpanTrain (arXiv:2505.15536): the number of micro-batches follows the network.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.schedule import KINDS, Builder, one_f_one_b, peak_activations, zb_h1
from penstock.schedule.schedule import Schedule
from penstock.search.transformer.space import divisors
from penstock.simulate import step_seconds, table_of
from penstock.units import format_seconds


@dataclass(frozen=True, slots=True)
class StageCosts:
    """What a stage takes: seconds of every call, and of each sample; bytes of each sample.

    sent_bytes   handed on to the next stage, and back from it
    kept_bytes   from forward to backward
    room_bytes   for what is kept: memory less weights and all else
    Raises:   PlanError: a number below 0, or none.
    """

    call_s: float
    forward_s: float
    input_s: float
    weights_s: float
    sent_bytes: float = 0.0
    kept_bytes: float = 0.0
    room_bytes: float = math.inf

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value: float = getattr(self, name)
            if not value >= 0 or (value == math.inf and name != "room_bytes"):
                raise PlanError(f"{name} of a stage is {value}", hint="it must be 0 or more")

    def action_s(self, samples: float) -> tuple[float, ...]:
        """Return the seconds of F, B, I, W and U of so many samples; U takes none."""
        parts = (self.forward_s, self.input_s + self.weights_s, self.input_s, self.weights_s)
        return (*(self.call_s + samples * each for each in parts), 0.0)


class Setting(NamedTuple):
    """A schedule, and into how many micro-batches the batch is cut."""

    schedule: Builder
    num_micro_batches: int

    def __str__(self) -> str:
        """Return "one_f_one_b, 8 micro-batches"."""
        return f"{self.schedule.__name__}, {self.num_micro_batches} micro-batches"


@dataclass(frozen=True, slots=True)
class Adapted:
    """The best setting for the links there are, its step, and that of staying.

    tried   every setting that fits, with the seconds of its step
    """

    setting: Setting
    step_s: float
    staying_s: float
    tried: tuple[tuple[Setting, float], ...]

    def __str__(self) -> str:
        """Return the setting, its step, and that of staying."""
        staying = f"staying: {format_seconds(self.staying_s)}"
        return f"{self.setting}: {format_seconds(self.step_s)} per step; {staying}"


def adapt(
    stages: Sequence[StageCosts],
    links: Sequence[Link],
    batch: int,
    *,
    now: Setting,
    schedules: Sequence[Builder] = (one_f_one_b, zb_h1),
) -> Adapted:
    """Return the setting with the shortest step on these links; `now` where none is shorter.

    links       from each stage to the next
    schedules   to choose from, one stage on each rank
    Raises:   PlanError: links of other stages; `now` does not divide the batch; a schedule that
              places stages otherwise.
    """
    if len(links) != len(stages) - 1:
        raise PlanError(f"{len(links)} links between {len(stages)} stages", hint="give one fewer")
    if batch < 1 or now.num_micro_batches < 1 or batch % now.num_micro_batches:
        message = f"{now.num_micro_batches} micro-batches of a batch of {batch}"
        raise PlanError(message, hint="their number divides the batch")
    staying_s = _step_s(stages, links, batch, _schedule(now, len(stages)))
    tried: list[tuple[Setting, float]] = []
    for builder in schedules:
        for count in divisors(batch):
            setting = Setting(builder, count)
            schedule = _schedule(setting, len(stages))
            if _fits(stages, batch, schedule):
                tried.append((setting, _step_s(stages, links, batch, schedule)))
    best, step_s = min(tried, key=lambda each: each[1], default=(now, staying_s))
    if step_s >= staying_s:
        best, step_s = now, staying_s
    return Adapted(best, step_s, staying_s, tuple(tried))


def _schedule(setting: Setting, num_stages: int) -> Schedule:
    schedule = setting.schedule(num_stages, setting.num_micro_batches)
    if schedule.num_ranks != num_stages:
        message = f"{setting.schedule.__name__} places {num_stages} stages on {schedule.num_ranks}"
        raise PlanError(f"{message} ranks", hint="take a schedule with one stage on each rank")
    return schedule


def _step_s(
    stages: Sequence[StageCosts], links: Sequence[Link], batch: int, schedule: Schedule
) -> float:
    samples = batch / schedule.num_micro_batches
    seconds = np.zeros((1, len(KINDS), len(stages)))
    message_s = np.zeros((1, len(stages)))
    for at, stage in enumerate(stages):
        seconds[0, :, at] = stage.action_s(samples)
    for at, (stage, link) in enumerate(zip(stages, links, strict=False)):
        message_s[0, at] = link.latency_s + samples * stage.sent_bytes / link.bytes_per_s
    return float(step_seconds(table_of(schedule), seconds, message_s)[0])


def _fits(stages: Sequence[StageCosts], batch: int, schedule: Schedule) -> bool:
    samples = batch / schedule.num_micro_batches
    held = zip(stages, peak_activations(schedule), strict=True)
    return all(count * samples * stage.kept_bytes <= stage.room_bytes for stage, count in held)
