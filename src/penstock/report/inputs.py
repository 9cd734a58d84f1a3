"""What a report is made of: a plan, two timelines, the figures of the steps and of the end."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ReportError, TimelineError
from penstock.files import Json, json_object, read_bytes
from penstock.plan import Plan
from penstock.timeline import (
    Breakdown,
    Timeline,
    breakdown_from_json,
    num_steps,
    peak_bytes,
    step_s,
)

RESUME = "let the run finish (`penstock train ... --resume`), or give another folder"
DAMAGED = "the file is damaged; run again, or take the file away and resume"
_MOST_S = 1e15
OWN_KEYS = (
    "val_loss",
    "checked",
    "step_s_predicted",
    "step_s_measured",
    "peak_bytes_predicted",
    "peak_bytes_measured",
    "cap_bytes",
    "breakdown",
    "bottleneck",
)


class Step(NamedTuple):
    """The figures of one optimizer step; a loss may be no number."""

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


@dataclass(frozen=True, slots=True)
class Inputs:
    """All that a page shows; a part that is not there is None or empty.

    peak_bytes and cap_bytes are per rank; facts are what the job reports, by name; checked is
    how the run was held against the plain loop.
    """

    title: str
    plan: Plan | None
    predicted: Timeline | None
    measured: Timeline | None
    steps: tuple[Step, ...]
    val_loss: float | None
    step_s: Pair
    peak_bytes: tuple[tuple[int, ...], tuple[int, ...]]
    cap_bytes: tuple[int, ...]
    facts: tuple[tuple[str, float | str], ...]
    breakdown: Breakdown | None = None
    checked: str | None = None

    @property
    def clocks(self) -> tuple[tuple[str, Timeline], ...]:
        """Return the timelines that are there, by name."""
        both = (("predicted", self.predicted), ("measured", self.measured))
        return tuple((name, timeline) for name, timeline in both if timeline is not None)

    @property
    def num_ranks(self) -> int:
        """Return the greatest number of ranks that a part speaks of."""
        counts = [timeline.num_ranks for _, timeline in self.clocks]
        return max([*counts, *map(len, self.peak_bytes)], default=0)

    @property
    def nats(self) -> tuple[tuple[str, float], ...]:
        """Return the job's figures that can stand beside a loss: their names end in "_nats"."""
        pairs = (pair for pair in self.facts if pair[0].endswith("_nats"))
        return tuple((name, value) for name, value in pairs if isinstance(value, float))


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
    """Return what a report is made of; figures that `summary` lacks come from timelines and plan.

    Raises:   ReportError: a figure that is no number.
    """
    predicted, measured = timelines
    reader = _Reader(summary, "the summary")
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
        val_loss=reader.number("val_loss"),
        step_s=Pair(
            _first(reader.seconds("step_s_predicted"), lengths_s[0], plan_s),
            _first(reader.seconds("step_s_measured"), lengths_s[1]),
        ),
        peak_bytes=(
            reader.sizes("peak_bytes_predicted") or peaks[0] or plan_bytes,
            reader.sizes("peak_bytes_measured") or peaks[1],
        ),
        cap_bytes=reader.sizes("cap_bytes", ranks),
        facts=tuple(_facts("", {k: v for k, v in summary.items() if k not in OWN_KEYS})),
        breakdown=_breakdown(summary.get("breakdown")),
        checked=reader.text("checked"),
    )


def _breakdown(content: Json) -> Breakdown | None:
    try:
        return None if content is None else breakdown_from_json(content)
    except TimelineError as problem:
        message = f'"breakdown" of the summary is damaged: {problem.message}'
        raise ReportError(message, hint=DAMAGED) from problem


def steps_of(metrics: Iterable[Mapping[str, Json]]) -> tuple[Step, ...]:
    """Return the steps in order; of a step that was done twice (after a resume) the last stands.

    Raises:   ReportError: no step, loss or seconds, or one that is no number.
    """
    steps: dict[int, Step] = {}
    for at, line in enumerate(metrics):
        reader = _Reader(line, f"line {at + 1} of the metrics")
        step = reader.needed("step")
        if not step.is_integer() or abs(step) > 2**53:
            raise ReportError(f"{reader.place} has step {step}, no whole number", hint=DAMAGED)
        steps[int(step)] = Step(
            int(step),
            reader.needed("loss"),
            reader.needed("seconds"),
            reader.number("samples_per_second"),
            reader.number("tokens_per_second"),
            reader.number("val_loss"),
        )
    return tuple(steps[at] for at in sorted(steps))


def read(folder: Path) -> Inputs:
    """Return what `penstock train` left in `folder`.

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
    """Return what is in a file of a run; without it the run has not ended."""
    try:
        return read_bytes(path, ReportError, what)
    except ReportError as problem:
        raise ReportError(problem.message, hint=RESUME) from problem


class _Reader(NamedTuple):
    """An object of a file and its place; each method takes a value as one type or raises."""

    values: Mapping[str, Json]
    place: str

    def number(self, key: str) -> float | None:
        value = self.values.get(key)
        return None if value is None else self._float(key, value)

    def seconds(self, key: str) -> float | None:
        """Return a time with which one can reckon."""
        value = self.number(key)
        if value is not None and not 0 <= value <= _MOST_S:
            raise self._wrong(key, self.values.get(key), "no time")
        return value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, value, "no text")
        return value

    def needed(self, key: str) -> float:
        if key not in self.values:
            raise ReportError(f'{self.place} has no "{key}"', hint=DAMAGED)
        value = self.values[key]
        return math.nan if value is None else self._float(key, value)

    def sizes(self, key: str, copies: int = 1) -> tuple[int, ...]:
        """Return bytes per rank; one number stands for `copies` ranks."""
        value = self.values.get(key)
        items = [value] * copies if isinstance(value, int | float) else value or []
        if not isinstance(items, list):
            raise self._wrong(key, value)
        numbers = [self._float(key, item) for item in items]
        if not all(map(math.isfinite, numbers)):
            raise self._wrong(key, value)
        return tuple(map(int, numbers))

    def _float(self, key: str, value: Json) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value)
        if abs(value) > 1e300:  # a whole number may be beyond any float
            return math.inf if value > 0 else -math.inf
        return float(value)

    def _wrong(self, key: str, value: Json, what: str = "no number") -> ReportError:
        return ReportError(f'"{key}" of {self.place} is {value!r:.60}, {what}', hint=DAMAGED)


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
                yield prefix + key, _Reader({key: value}, "the summary").needed(key)
            case str():
                yield prefix + key, value
            case list():
                yield prefix + key, json.dumps(value)
