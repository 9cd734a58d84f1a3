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
from penstock.typed import Endless, damage, typed, typed_flat

RESUME = "let the run finish (`penstock train ... --resume`), or give another folder"
DAMAGED = "the file is damaged; run again, or remove the file and resume"
_Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e15, description="a usable time")]
_Bytes: TypeAlias = float | tuple[float, ...] | None


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
class ProofWords:
    """In words, how the run was compared with the plain loop before it began, and while it ran."""

    checked: str | None = None
    audited: str | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """Who took part in the run: ranks, machines, and phases of a run that went on until a loss."""

    generations: tuple[Generation, ...] = ()
    machines: tuple[FleetDecision, ...] = ()
    until: Any = None


@dataclass(frozen=True, slots=True)
class _SummaryBytes:
    """The bytes of a summary."""

    peak_bytes_predicted: _Bytes = None
    peak_bytes_measured: _Bytes = None
    cap_bytes: _Bytes = None
    held_bytes: tuple[dict[str, int], ...] = ()
    far_bytes_predicted: _Bytes = None
    far_bytes_measured: _Bytes = None


@dataclass(frozen=True, slots=True)
class _StepRates:
    """What a step takes, as a summary has it."""

    step_s_predicted: _Time | None = None
    step_s_measured: _Time | None = None
    flop_per_s: _Time | None = None
    flop_per_s_of_devices: _Time | None = None
    joules_per_step: _Time | None = None


@dataclass(frozen=True, slots=True)
class _Summary:
    """The figures of a summary that are not facts of the job."""

    proof: ProofWords
    sizes: _SummaryBytes
    rates: _StepRates
    changes: Membership
    val_loss: Endless | None = None


_PARTS = "proof", "sizes", "rates", "changes"  # of a summary, whose fields are among its own
_ELSEWHERE = "audited_to", "audits", "mfu", "breakdown", "bottleneck"  # read by others
_NAMES = frozenset(
    each.name
    for kind in (ProofWords, _SummaryBytes, _StepRates, Membership, _Summary)
    for each in fields(kind)
)
_KNOWN = _NAMES.difference(_PARTS)


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

    peak_bytes:  of each rank, predicted and measured; far_bytes, too.
    cap_bytes:   of each rank, the most that it may hold.
    held_bytes:  of each rank, by what they are for.
    flop_per_s:  of the devices, and of the model on them.
    joules:      of a step, where the machine tells.
    """

    peak_bytes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    cap_bytes: tuple[int, ...] = ()
    held_bytes: tuple[dict[str, int], ...] = ()
    far_bytes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    flop_per_s: Pair = Pair(None, None)
    joules: float | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a page shows; a missing part is None or empty.

    facts:   what the job reports, by name.
    """

    title: str
    plan: Plan | None
    predicted: Timeline | None
    measured: Timeline | None
    steps: tuple[StepFigures, ...]
    val_loss: float | None
    step_s: Pair
    used: Used
    facts: tuple[tuple[str, float | str], ...]
    breakdown: Breakdown | None = None
    proof: ProofWords = ProofWords()
    changes: Membership = Membership()

    @property
    def clocks(self) -> tuple[tuple[str, Timeline], ...]:
        """Return the timelines that are there, by name."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return tuple((name, timeline) for name, timeline in both if timeline is not None)

    @property
    def num_ranks(self) -> int:
        """Return the largest number of ranks that a part mentions."""
        counts = [timeline.num_ranks for _, timeline in self.clocks]
        return max([*counts, *map(len, self.used.peak_bytes)], default=0)


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
    told = {name: summary[name] for name in _KNOWN & summary.keys()}
    with damage("the summary", ReportError, hint=DAMAGED):
        own = typed_flat(_Summary, _plain(told), *_PARTS)
    lengths_s = [None if t is None else step_s(t) / num_steps(t) for t in timelines]
    plan_s = None if plan is None or plan.predicted is None else plan.predicted.step_s
    peaks = [() if t is None or not any(peak_bytes(t)) else peak_bytes(t) for t in timelines]
    plan_bytes = () if plan is None or plan.predicted is None else plan.predicted.peak_bytes
    ranks = max([*(t.num_ranks for t in timelines if t is not None), 1])
    rates = own.rates
    return Inputs(
        title=title,
        plan=plan,
        predicted=predicted,
        measured=measured,
        steps=steps_of(metrics),
        val_loss=own.val_loss,
        step_s=Pair(
            _first(rates.step_s_predicted, plan_s, lengths_s[0]),
            _first(rates.step_s_measured, lengths_s[1]),
        ),
        used=_used(own, (peaks[0] or plan_bytes, peaks[1]), ranks),
        facts=tuple(_facts("", _of_the_job(summary))),
        breakdown=_breakdown(summary.get("breakdown")),
        proof=own.proof,
        changes=own.changes,
    )


def _of_the_job(summary: Mapping[str, Json]) -> dict[str, Json]:
    return {k: v for k, v in summary.items() if k not in _KNOWN and k not in _ELSEWHERE}


def _used(own: _Summary, peaks: tuple[tuple[int, ...], tuple[int, ...]], ranks: int) -> Used:
    """Return the bytes and the speed that a summary tells.

    peaks:   those of the timelines, which count where the summary has none.
    """
    sizes, rates = own.sizes, own.rates
    told = sizes.peak_bytes_predicted, sizes.peak_bytes_measured
    return Used(
        (_per_rank(told[0]) or peaks[0], _per_rank(told[1]) or peaks[1]),
        _per_rank(sizes.cap_bytes, ranks),
        sizes.held_bytes,
        (_per_rank(sizes.far_bytes_predicted), _per_rank(sizes.far_bytes_measured)),
        Pair(rates.flop_per_s_of_devices, rates.flop_per_s),
        rates.joules_per_step,
    )


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
            known = {each.name for each in fields(_MetricsLine)} & line.keys()
            own = typed(_MetricsLine, _plain({name: line[name] for name in known}))
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


def _plain(values: Mapping[str, Json]) -> dict[str, Json]:
    """Return values with numpy floats as plain ones."""
    return {k: float(v) if isinstance(v, float) else v for k, v in values.items()}


def _per_rank(value: _Bytes, copies: int = 1) -> tuple[int, ...]:
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
