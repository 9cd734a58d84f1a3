"""Report: one page that shows a plan, what was predicted of it, and what was measured."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from penstock.files import Json, write_text
from penstock.plan.plan import Plan
from penstock.report.headline import sentence
from penstock.report.inputs import Inputs, inputs_of, read
from penstock.report.page import page
from penstock.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Report:
    """A self-contained HTML document; as text, its headline."""

    html: str = field(repr=False)
    headline: str = ""

    def __str__(self) -> str:
        return self.headline

    def _repr_html_(self) -> str:
        """Return the page in a frame of a notebook."""
        frame = 'style="width:100%;height:40rem;border:0"'
        return f'<iframe srcdoc="{escape(self.html)}" {frame}></iframe>'

    def save(self, path: Path | str) -> None:
        """Write the page to `path`, whole or not at all."""
        write_text(path, self.html)


def report(
    plan: Plan | None,
    predicted: Timeline | None,
    measured: Timeline | None,
    *,
    metrics: Iterable[Mapping[str, Json]] = (),
    summary: Mapping[str, Json] | None = None,
    title: str = "",
) -> Report:
    """Return the report of a run; a part that is None is said to be missing.

    metrics:  for each step `step`, `loss`, `seconds`, and perhaps `samples_per_second` and
              `tokens_per_second`.
    summary:  figures of the end, as in summary.json (docs/report.md).
    Raises:   ReportError: a figure that is not a number.
    """
    return _report(inputs_of(plan, (predicted, measured), metrics, summary or {}, title))


def report_of(folder: Path | str) -> Report:
    """Return the report of the run that `penstock train` left in `folder`.

    Raises:   ReportError: no run, or its metrics or summary are missing or damaged.
              PlanError, TimelineError: its plan or a timeline is missing or damaged.
    """
    return _report(read(Path(folder)))


def _report(inputs: Inputs) -> Report:
    return Report(page(inputs), sentence(inputs))
