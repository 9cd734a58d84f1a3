"""Wall: where the wall time of the run went, a bar per rank, and its bottleneck."""

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.report.figure_words import (
    ABSENT,
    TimeUnit,
    count_text,
    error_of,
    percent_text,
    seconds_text,
    time_unit,
)
from penstock.report.inputs import Inputs
from penstock.report.markup import (
    Markup,
    figure_cell,
    join,
    number_head,
    section,
    table,
    tag,
)
from penstock.report.thin import MAX_RANKS, even_ranks
from penstock.timeline.bottleneck import Bottleneck, bottleneck
from penstock.timeline.breakdown import PART_WORDS, PARTS, Breakdown, Part, breakdown_of
from penstock.timeline.timeline import num_steps

WIDTH, LEFT, RIGHT, TALL, LOW, GAP = 1120, 76, 70, 18, 9, 8


class Style(NamedTuple):
    """The colour of a part, and whether upright and level lines are drawn over it."""

    class_: str
    upright: bool = False
    level: bool = False


LOOKS: dict[Part, Style] = {
    "data": Style("track", upright=True),
    "F": Style("F"),
    "B": Style("B"),
    "I": Style("I"),
    "W": Style("W"),
    "optimizer": Style("U"),
    "copies": Style("offload"),
    "messages": Style("unshard"),
    "waiting": Style("track"),
    "collectives": Style("reduce"),
    "meeting": Style("track", level=True),
    "checkpoint": Style("track", upright=True, level=True),
    "rest": Style("rest"),
}


def wall(inputs: Inputs) -> Iterator[Markup]:
    """Yield the bars of all ranks, the table of the parts, and the bottleneck."""
    measured = inputs.breakdown
    if measured is None:
        return
    predicted, found = predicted_of(inputs), found_in(inputs)
    assert found is not None, "there is a breakdown"
    intro = (
        f"Seconds of a step, mean of {count_text(measured.num_steps, 'step')}, by the clock of each"
        " rank's computing thread.  The parts sum to the wall time of the training loop."
    )
    if predicted is not None:
        intro += "  The thin bar above each rank is what was predicted; of that, all but computes,"
        intro += " updates and collectives is waiting."
    parts = [tag("p", *_words(found), class_="note"), tag("p", intro), _legend(measured, predicted)]
    if measured.num_ranks > MAX_RANKS:
        left = f"{MAX_RANKS} of {measured.num_ranks:,} ranks are drawn."
        parts.append(tag("p", left, class_="note"))
    parts.append(tag("figure", _bars(measured, predicted), class_="scroll"))
    yield section("Where the wall time went", *parts, _table(measured, predicted))


def predicted_of(inputs: Inputs) -> Breakdown | None:
    """Return the breakdown of the predicted timeline, if it has as many ranks."""
    timeline, each_s = inputs.predicted, inputs.step_s.predicted
    if timeline is None or inputs.breakdown is None:
        return None
    found = breakdown_of(timeline, None if each_s is None else each_s * num_steps(timeline))
    if found is None:
        return None
    return found if found.num_ranks == inputs.breakdown.num_ranks else None


def found_in(inputs: Inputs) -> Bottleneck | None:
    """Return the run's bottleneck; None where its wall time is unknown."""
    if inputs.breakdown is None:
        return None
    newest = inputs.steps[-inputs.breakdown.num_steps :]
    steps_s = [step.seconds for step in newest if math.isfinite(step.seconds)]
    return bottleneck(inputs.breakdown, predicted_of(inputs), steps_s)


def _words(found: Bottleneck) -> tuple[Markup, str]:
    hint = f"  What may help: {found.hint}." if found.hint else ""
    return tag("strong", f"Bottleneck: {found.title}"), f": {found.evidence}.{hint}"


def _shown(measured: Breakdown, predicted: Breakdown | None) -> list[Part]:
    both = [one for one in (predicted, measured) if one is not None]
    return [part for part in LOOKS if any(any(one.of(part)) for one in both)]


# -- bars ------------------------------------------------------------------------------------------


def _bars(measured: Breakdown, predicted: Breakdown | None) -> Markup:
    both = [one for one in (predicted, measured) if one is not None]
    longest_s = max([one.step_s for one in both]) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest_s
    children: list[Markup] = []
    y = 0
    for rank in even_ranks(measured.num_ranks):
        if predicted is not None:
            children += _bar(predicted, rank, (y, LOW), scale, "predicted")
            y += LOW + 2
        name = tag("text", f"rank {rank}", x=0, y=y + TALL - 4, class_="rank")
        children += [name, *_bar(measured, rank, (y, TALL), scale, "measured")]
        y += TALL + GAP
    title = "Where a step's wall time went on each rank"
    return tag(
        "svg",
        tag("title", title),
        *children,
        viewBox=f"0 0 {WIDTH} {y}",
        class_="walls",
        role="img",
        aria_label=title,
    )


def _bar(
    one: Breakdown, rank: int, place: tuple[int, int], scale: float, clock: str
) -> Iterator[Markup]:
    (y, height), x, whole_s = place, float(LEFT), 0.0
    for part, look in LOOKS.items():
        seconds = max(0.0, one.of(part)[rank])
        if seconds * scale >= 0.05:
            words = f"rank {rank}, {PART_WORDS[part]}: {seconds_text(seconds)} {clock}"
            yield _box(look, (x, y, seconds * scale, height), words)
        x += seconds * scale
        whole_s += seconds
    text = seconds_text(whole_s)
    small = "small" if height == LOW else None
    yield tag("text", text, x=f"{x + 6:.1f}", y=y + height - (1 if small else 4), class_=small)


def _box(look: Style, box: tuple[float, float, float, float], words: str) -> Markup:
    x, y, width, height = box
    where = {"x": f"{x:.2f}", "y": f"{y:g}", "width": f"{width:.2f}", "height": f"{height:g}"}
    ups = [f"M{x + at:.1f} {y:g}v{height:g}" for at in range(2, int(width), 5)]
    levels = [f"M{x:.1f} {y + at:g}h{width:.1f}" for at in range(2, int(height), 4)]
    lines = "".join([*(ups if look.upright else ()), *(levels if look.level else ())])
    rect = tag("rect", **where, class_=f"span {look.class_}")
    drawn = [tag("path", d=lines, class_="hatch")] if lines else []
    return tag("g", tag("title", words), rect, *drawn)


def _legend(measured: Breakdown, predicted: Breakdown | None) -> Markup:
    items = (
        tag(
            "li",
            tag(
                "svg",
                _box(LOOKS[part], (0, 1, 14, 12), PART_WORDS[part]),
                width=14,
                height=14,
                aria_hidden="true",
                class_="swatch",
            ),
            PART_WORDS[part],
        )
        for part in _shown(measured, predicted)
    )
    return tag("ul", join(items), class_="legend")


# -- table -----------------------------------------------------------------------------------------


def _table(measured: Breakdown, predicted: Breakdown | None) -> Markup:
    unit = time_unit([measured.step_s])
    head = ["Part", number_head(f"Measured, {unit.name}"), number_head("Share")]
    head += [number_head("Most")]
    if predicted is not None:
        head[1:1] = [number_head(f"Predicted, {unit.name}")]
        head.insert(3, number_head("Error"))
    rows = [
        _table_row(PART_WORDS[part], _figures(measured, predicted, [part]), measured, unit)
        for part in _shown(measured, predicted)
    ]
    steps = _figures(measured, predicted, PARTS[:-1])
    rows.append(_table_row("a step, mean", steps, measured, unit, last=True))
    once_s = max(measured.of("once"))
    label = "Seconds of a step by part: mean of the ranks, and the rank with the most"
    note = (
        f"Mean of the ranks.  Besides, the run took {seconds_text(once_s)} for the first step, the"
        " one under the memory profiler, and the last checkpoint."
    )
    return join([table(label, head, rows), tag("p", note)])


def _figures(
    measured: Breakdown, predicted: Breakdown | None, parts: Sequence[Part]
) -> tuple[list[float] | None, list[float]]:
    """Return the seconds of a step of some parts together, on every rank by either clock."""

    def of(one: Breakdown) -> list[float]:
        return [sum(row) for row in zip(*map(one.of, parts), strict=True)]

    return None if predicted is None else of(predicted), of(measured)


def _table_row(
    name: str,
    figures: tuple[list[float] | None, list[float]],
    measured: Breakdown,
    unit: TimeUnit,
    *,
    last: bool = False,
) -> Markup:
    known, found = figures
    mean_s = statistics.fmean(found)
    most = max(range(len(found)), key=found.__getitem__)
    share = mean_s / measured.step_s if measured.step_s else 0.0
    cells = [unit.of(mean_s), f"{100 * share:.1f} %", f"{unit.of(found[most])} on rank {most}"]
    if known is not None:
        known_s = statistics.fmean(known)
        cells.insert(0, unit.of(known_s) if known_s else ABSENT)
        cells.insert(2, percent_text(error_of(known_s, mean_s)) if known_s else ABSENT)
    head = tag("th", name, scope="row", class_="what")
    return tag("tr", head, *map(figure_cell, cells), class_="whole" if last else None)
