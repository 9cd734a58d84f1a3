"""What a report is made of: a plan, two timelines, the figures of the steps and of the end."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

from msgspec import Meta

from penstock.errors import ReportError, TimelineError
from penstock.files import Json, json_object, read_bytes
from penstock.plan.plan import Plan
from penstock.report.wanted import FleetDecision
from penstock.timeline.breakdown import Breakdown, breakdown_from_json
from penstock.timeline.timeline import Timeline, num_steps, peak_bytes, step_s
from penstock.typed import Endless, damage, typed

RESUME = "let the run finish (`penstock train ... --resume`), or give another folder"
DAMAGED = "the file is damaged; run again, or remove the file and resume"
_Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e15, description="a usable time")]
_Sizes: TypeAlias = float | tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class _MetricsLine:
    """A line of the metrics."""

    step: int
    loss: Endless | None
    seconds: Endless | None
    samples_per_second: Endless | None = None
    tokens_per_second: Endless | None = None
    val_loss: Endless | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The ranks that worked together for a while, as a line of events.jsonl has it.

    time:     at the end of its first step, in seconds of the clock.
    members:  their numbers in the run, by rank.
    gone:     who had gone before, and how.
    agreed_s, ready_s, stepped_s:  from the end of the one before until all agreed, until the state
              was in place, until the first step was done.
    """

    time: float
    step: int
    generation: int
    what: str
    members: tuple[int, ...]
    plan: str
    why: str
    gone: Mapping[str, str] = field(default_factory=dict[str, str])
    way: str = ""
    agreed_s: float = 0.0
    ready_s: float = 0.0
    stepped_s: float = 0.0
    moved_bytes: int = 0
    predicted_moved_bytes: int = 0
    predicted_step_s: float | None = None
    micro_batches: int = 0
    back_to: str = ""

    @property
    def cost_s(self) -> float:
        """Return the seconds from the end of the one before to the end of the next step."""
        return self.agreed_s + self.ready_s + self.stepped_s


@dataclass(frozen=True, slots=True)
class _Summary:
    """The figures of a summary that are not facts of the job; `breakdown` has its own reader."""

    val_loss: Endless | None = None
    checked: str | None = None
    audited: str | None = None
    audited_to: int | None = None
    audits: Any = None
    step_s_predicted: _Time | None = None
    step_s_measured: _Time | None = None
    peak_bytes_predicted: _Sizes = None
    peak_bytes_measured: _Sizes = None
    cap_bytes: _Sizes = None
    held_bytes: tuple[dict[str, int], ...] = ()
    far_bytes_predicted: _Sizes = None
    far_bytes_measured: _Sizes = None
    flop_per_s: _Time | None = None
    flop_per_s_of_devices: _Time | None = None
    mfu: _Time | None = None
    joules_per_step: _Time | None = None
    breakdown: Any = None
    bottleneck: Any = None
    generations: tuple[Generation, ...] = ()
    machines: tuple[FleetDecision, ...] = ()
    until: Any = None


class StepFigures(NamedTuple):
    """The figures of one optimizer step; a loss may be nan or infinite."""

    step: int
    loss: float
    seconds: float
    samples_per_second: float | None
    tokens_per_second: float | None
    val_loss: float | None = None


class Pair(NamedTuple):
    """One figure in both clocks; None where it is not known."""

    predicted: float | None
    measured: float | None


class Used(NamedTuple):
    """What was used of the devices.

    held_bytes:  of each rank, by what they are for.
    far_bytes:   of each rank, predicted and measured.
    flop_per_s:  of the devices, and of the model on them.
    joules:      of a step, where the machine tells.
    """

    held_bytes: tuple[dict[str, int], ...] = ()
    far_bytes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    flop_per_s: Pair = Pair(None, None)
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a page shows; a missing part is None or empty.

    peak_bytes and cap_bytes are per rank; facts are what the job reports, by name; checked is
    how the run was compared with the plain loop before it began, and audited what was found in it.
    """

    title: str
    plan: Plan | None
    predicted: Timeline | None
    measured: Timeline | None
    steps: tuple[StepFigures, ...]
    val_loss: float | None
    step_s: Pair
    peak_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    cap_bytes: tuple[int, ...]
    facts: tuple[tuple[str, float | str], ...]
    breakdown: Breakdown | None = None
    used: Used = Used()  # noqa: RUF009 - a tuple
    checked: str | None = None
    audited: str | None = None
    generations: tuple[Generation, ...] = ()
    machines: tuple[FleetDecision, ...] = ()
    until: Json = None

    @property
    def clocks(self) -> tuple[tuple[str, Timeline], ...]:
        """Return the timelines that are there, by name."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return tuple((name, timeline) for name, timeline in both if timeline is not None)

    @property
    def num_ranks(self) -> int:
        """Return the largest number of ranks that a part mentions."""
        counts = [timeline.num_ranks for _, timeline in self.clocks]
        return max([*counts, *map(len, self.peak_bytes)], default=0)


def at_rank(values: Sequence[int], rank: int) -> int | None:
    """Return the value of a rank, or None if there is none."""
    return values[rank] if rank < len(values) else None


def inputs_of(
    plan: Plan | None,
    timelines: tuple[Timeline | None, Timeline | None],
    metrics: Iterable[Mapping[str, Json]],
    summary: Mapping[str, Json],
    title: str,
) -> Inputs:
    """Return the inputs of a report; timelines and plan supply figures that `summary` lacks.

    Raises:   ReportError: a figure that is not a number.
    """
    predicted, measured = timelines
    with damage("the summary", ReportError, hint=DAMAGED):
        own = typed(_Summary, _figures(_Summary, summary))
    lengths_s = [None if t is None else step_s(t) / num_steps(t) for t in timelines]
    plan_s = None if plan is None or plan.predicted is None else plan.predicted.step_s
    peaks = [() if t is None or not any(peak_bytes(t)) else peak_bytes(t) for t in timelines]
    plan_bytes = () if plan is None or plan.predicted is None else plan.predicted.peak_bytes
    ranks = max([*(t.num_ranks for t in timelines if t is not None), 1])
    return Inputs(
        title=title,
        plan=plan,
        predicted=predicted,
        measured=measured,
        steps=steps_of(metrics),
        val_loss=own.val_loss,
        step_s=Pair(
            _first(own.step_s_predicted, plan_s, lengths_s[0]),
            _first(own.step_s_measured, lengths_s[1]),
        ),
        peak_bytes=(
            _sizes(own.peak_bytes_predicted) or peaks[0] or plan_bytes,
            _sizes(own.peak_bytes_measured) or peaks[1],
        ),
        cap_bytes=_sizes(own.cap_bytes, ranks),
        used=_used(own),
        facts=tuple(_facts("", _of_the_job(summary))),
        breakdown=_breakdown(summary.get("breakdown")),
        checked=own.checked,
        audited=own.audited,
        generations=own.generations,
        machines=own.machines,
        until=summary.get("until"),
    )


def _of_the_job(summary: Mapping[str, Json]) -> dict[str, Json]:
    own = {each.name for each in fields(_Summary)}
    return {name: value for name, value in summary.items() if name not in own}


def _used(own: _Summary) -> Used:
    far = _sizes(own.far_bytes_predicted), _sizes(own.far_bytes_measured)
    flop_per_s = Pair(own.flop_per_s_of_devices, own.flop_per_s)
    return Used(own.held_bytes, far, flop_per_s, own.joules_per_step)


def _breakdown(content: Json) -> Breakdown | None:
    try:
        return None if content is None else breakdown_from_json(content)
    except TimelineError as problem:
        message = f'"breakdown" of the summary is damaged: {problem.message}'
        raise ReportError(message, hint=DAMAGED) from problem


def steps_of(metrics: Iterable[Mapping[str, Json]]) -> tuple[StepFigures, ...]:
    """Return the steps in order; of a step done twice (after a resume) the last counts.

    Raises:   ReportError: no step, loss or seconds, or one that is not a number.
    """
    steps: dict[int, StepFigures] = {}
    for at, line in enumerate(metrics):
        with damage(f"line {at + 1} of the metrics", ReportError, hint=DAMAGED):
            own = typed(_MetricsLine, _figures(_MetricsLine, line))
        loss, seconds = (math.nan if x is None else x for x in (own.loss, own.seconds))
        rates = own.samples_per_second, own.tokens_per_second
        steps[own.step] = StepFigures(own.step, loss, seconds, *rates, own.val_loss)
    return tuple(steps[at] for at in sorted(steps))


def read(folder: Path) -> Inputs:
    """Return the inputs that `penstock train` has left in `folder`.

    Without predicted.trace.json (a model that runs eagerly has no prediction) the plan may be
    missing too.
    Raises:   ReportError: no run, or metrics or summary are missing or damaged.
              TimelineError, PlanError: theirs are.
    """
    if not any((folder / name).exists() for name in ("measured.trace.json", "metrics.jsonl")):
        hint = "give the folder that `penstock train --out` wrote"
        what = "holds no run" if folder.is_dir() else "is no folder"
        raise ReportError(f"{folder} {what}: no measured.trace.json, no metrics.jsonl", hint=hint)
    predicted_path, plan_path = folder / "predicted.trace.json", folder / "plan.json"
    is_predicted = predicted_path.exists()
    plan = Plan.load(plan_path) if is_predicted or plan_path.exists() else None
    predicted = Timeline.load(predicted_path) if is_predicted else None
    measured = Timeline.load(folder / "measured.trace.json")
    metrics_path, summary_path = folder / "metrics.jsonl", folder / "summary.json"
    lines = list(_lines(metrics_path))
    content = _content(summary_path, "summary")
    summary = json_object(content, ReportError, f"summary {summary_path}")
    try:
        return inputs_of(plan, (predicted, measured), lines, summary, folder.resolve().name)
    except ReportError as problem:
        raise ReportError(f"{folder}: {problem.message}", hint=problem.hint) from problem


def _lines(path: Path) -> Iterable[Mapping[str, Json]]:
    for at, line in enumerate(_content(path, "metrics").splitlines()):
        if line.strip():
            yield json_object(line, ReportError, f"line {at + 1} of {path}")


def _content(path: Path, what: str) -> bytes:
    """Return the content of a file of a run; a run without it has not ended."""
    try:
        return read_bytes(path, ReportError, what)
    except ReportError as problem:
        raise ReportError(problem.message, hint=RESUME) from problem


def _figures(kind: Any, values: Mapping[str, Json]) -> dict[str, Json]:
    """Return the values that `kind` has fields for, numpy floats as plain ones."""
    own = {each.name: values[each.name] for each in fields(kind) if each.name in values}
    return {k: float(v) if isinstance(v, float) else v for k, v in own.items()}


def _sizes(value: _Sizes, copies: int = 1) -> tuple[int, ...]:
    """Return bytes per rank; one number stands for `copies` ranks."""
    each = (value,) * copies if isinstance(value, int | float) else value or ()
    return tuple(map(int, each))


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _facts(prefix: str, values: Mapping[str, Json]) -> Iterable[tuple[str, float | str]]:
    """Yield the figures of an object and of those within it, by dotted name."""
    for key, value in values.items():
        match value:
            case dict():
                yield from _facts(f"{prefix}{key}.", value)
            case bool() | None:
                yield prefix + key, {True: "yes", False: "no", None: "not known"}[value]
            case int() | float():
                huge = math.inf if value > 0 else -math.inf
                yield prefix + key, huge if abs(value) > 1e300 else float(value)
            case str():
                yield prefix + key, value
            case list():
                yield prefix + key, json.dumps(value)
