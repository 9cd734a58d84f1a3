"""Times: the table of seconds and counts per rank and kind, predicted beside measured."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from penstock.report.figure_words import (
    KIND_WORDS,
    TimeUnit,
    error_of,
    kind_words,
    percent_text,
    time_unit,
)
from penstock.report.inputs import Inputs
from penstock.report.markup import (
    Child,
    Markup,
    figure_cell,
    folded,
    number_head,
    section,
    swatch,
    table,
    tag,
)
from penstock.report.prediction_table import TimeRow, compare
from penstock.report.thin import MAX_RANKS, even_ranks
from penstock.timeline.timeline import num_steps


def times(inputs: Inputs) -> Iterator[Markup]:
    """Yield the table of seconds and counts, per rank and kind of action."""
    if not inputs.clocks:
        return
    rows = compare(inputs.predicted, inputs.measured, even_ranks(inputs.num_ranks))
    unit = time_unit(second for row in rows for second in row.seconds)
    intro = (
        "Error is predicted / measured \u2212 1: below zero, the prediction was too low."
        "  Waiting is the step less computes and updates; messages and collectives run beside them."
        "  Two counts are predicted / measured."
    )
    head = (
        *("Rank", "Action", number_head("Count")),
        number_head(f"Predicted, {unit.name}"),
        number_head(f"Measured, {unit.name}"),
        number_head("Error"),
        tag("th", tag("span", "Error as a bar", class_="unseen"), scope="col"),
    )
    steps = max(num_steps(timeline) for _, timeline in inputs.clocks)
    total = "step total" if steps == 1 else f"total of {steps:,} steps"
    body = _groups(rows, unit, total)
    parts = [
        tag("p", intro),
        table("Times per rank and kind of action", head, body, long=inputs.num_ranks > 4),
    ]
    if inputs.num_ranks > MAX_RANKS:
        left = f"{MAX_RANKS} of {inputs.num_ranks:,} ranks have rows of their own."
        parts.insert(1, tag("p", left, class_="note"))
    made = section if inputs.breakdown is None else folded  # the one table of time is that
    yield made("Every kind of action", *parts)


def _groups(rows: Sequence[TimeRow], unit: TimeUnit, total: str) -> Iterator[Markup]:
    """Yield the table's rows, grouped by rank under a heading each."""
    for rank, group in groupby(rows, key=lambda row: row.rank):
        name = "all: sum of counts, mean of times" if rank is None else f"rank {rank}"
        own = list(group)
        for row in own:
            first = row is own[0]
            last = row.what == "step"
            error = error_of(*row.seconds)
            yield tag(
                "tr",
                tag("th", name, rowspan=len(own), scope="rowgroup") if first else "",
                tag("th", *_what(row.what, total), scope="row", class_="what"),
                figure_cell(_counts(row.counts)),
                *(figure_cell(unit.of(seconds)) for seconds in row.seconds),
                figure_cell(percent_text(error)),
                tag("td", _bar(error), class_="bar"),
                class_="first" if first else "whole" if last else None,
            )


def _counts(counts: tuple[int | None, int | None]) -> str:
    """Return the counts of both clocks as one figure, or as two where they differ."""
    texts = [f"{count:,}" for count in dict.fromkeys(counts) if count is not None]
    return " / ".join(texts)


def _what(what: str, total: str) -> tuple[Child, ...]:
    if what in KIND_WORDS:
        return swatch(what), kind_words(what)
    names = {"sent": "messages sent", "received": "messages received", "step": total}
    return swatch("track" if what == "waiting" else "none"), names.get(what, what)


def _bar(error: float | None, *, full: float = 0.25) -> Child:
    """Return an error as a bar from the middle, `full` at the ends, an arrow beyond."""
    if error is None or not math.isfinite(error):
        return ""
    side, length = ("low" if error < 0 else "high"), 40 * max(-1.0, min(1.0, error / full))
    x, width = f"{44 + min(0.0, length):.1f}", f"{abs(length):.1f}"
    bar = tag("rect", x=x, y=3, width=width, height=8, class_=side)
    tip, base = (0, 4) if error < 0 else (88, 84)
    beyond = f"M{base} 1L{tip} 7L{base} 13z" if abs(error) > full else ""
    point = tag("path", d=beyond, class_=side)
    middle = tag("path", d="M44 0v14", class_="axis")
    return tag("svg", bar, point, middle, width=88, height=14, aria_hidden="true")
