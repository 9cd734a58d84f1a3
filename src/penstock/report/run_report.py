"""Report of a run in Python: its timeline alone, or its losses too."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from penstock.files import Json
from penstock.plan.plan import Plan
from penstock.report.report import Report
from penstock.report.report import report as report_timelines
from penstock.timeline.breakdown import Breakdown
from penstock.timeline.timeline import Timeline


class FinishedStep(Protocol):
    """One optimizer step that was run."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def seconds(self) -> float: ...


class Measured(Protocol):
    """What `penstock.run` returns (no torch is needed to show it)."""

    @property
    def timeline(self) -> Timeline: ...
    @property
    def steps(self) -> Sequence[FinishedStep]: ...
    @property
    def step_s(self) -> float: ...
    @property
    def peak_bytes(self) -> Sequence[int]: ...
    @property
    def breakdown(self) -> Breakdown | None: ...


def report(
    plan: Plan | None,
    predicted: Timeline | None,
    measured: Timeline | Measured | None,
    *,
    metrics: Iterable[Mapping[str, Json]] = (),
    summary: Mapping[str, Json] | None = None,
    title: str = "",
) -> Report:
    """Return the report of a run; a part that is None is said to be missing.

    measured:  what `run` returned, or a timeline alone; `metrics` and `summary`, where given,
               stand instead of what it says.
    Raises:    ReportError: a figure that is not a number.
    """
    if measured is None or isinstance(measured, Timeline):
        timeline = measured
    else:
        timeline = measured.timeline
        metrics = tuple(metrics) or [
            {"step": s.step, "loss": s.loss, "seconds": s.seconds} for s in measured.steps
        ]
        summary = summary or {
            "step_s_measured": measured.step_s,
            "peak_bytes_measured": list(measured.peak_bytes),
            "breakdown": measured.breakdown.to_json() if measured.breakdown else None,
        }
    return report_timelines(
        plan, predicted, timeline, metrics=metrics, summary=summary, title=title
    )
