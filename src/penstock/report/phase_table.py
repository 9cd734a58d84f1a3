"""Phases: the ranks and batches that a run to a loss has tried, and what was chosen, as a table."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import ReportError
from penstock.files import Json
from penstock.report.figure_words import ABSENT, number_text, seconds_text
from penstock.report.markup import Markup, figure_cell, number_head, section, table, tag
from penstock.typed import Endless, damage, typed


@dataclass(frozen=True, slots=True)
class PhaseTold:
    """Some steps with so many ranks and micro-batches, as a summary has them."""

    step: int
    ranks: int
    micro_batches: int
    plan: str
    steps: int
    predicted_s: Endless
    step_s: Endless
    gain: Endless
    factor: Endless


@dataclass(frozen=True, slots=True)
class ChoiceTold:
    """What was chosen, and foreseen of it."""

    why: str
    scale: Endless | None
    step_s: Endless
    own: Endless | None
    seconds: Endless | None
    cost: Endless | None


@dataclass(frozen=True, slots=True)
class UntilTold:
    """A run to a loss: how far it came, what it took, predicted and measured."""

    loss: Endless
    by: str
    reached: bool
    reached_loss: Endless | None = None
    step_s: Endless | None = None
    own_steps: Endless | None = None
    seconds: Endless | None = None
    cost: Endless | None = None
    cost_in: str = ""


def told_in(content: Json) -> tuple[UntilTold, tuple[PhaseTold, ...], ChoiceTold | None] | None:
    """Return the phases in a summary; None: the run had no loss to reach.

    Raises:   ReportError: it is damaged.
    """
    if not isinstance(content, dict):
        return None
    rows, chosen = content.get("phases"), content.get("chosen")
    with damage("what the summary tells of its phases", ReportError, hint="run again"):
        told = typed(UntilTold, _own(UntilTold, content))
        listed = rows if isinstance(rows, list) else []
        phases = tuple(typed(PhaseTold, _own(PhaseTold, row)) for row in listed)
        choice = typed(ChoiceTold, _own(ChoiceTold, chosen)) if chosen is not None else None
    return told, phases, choice


def _own(kind: Any, values: Json) -> Mapping[str, Json]:
    names = {each.name for each in fields(kind)}
    own = values if isinstance(values, dict) else {}
    return {name: value for name, value in own.items() if name in names}


def phases_section(content: Json) -> Iterator[Markup]:
    """Yield the story of a run to a loss; nothing of any other."""
    found = told_in(content)
    if found is None:
        return
    told, phases, chosen = found
    last = ABSENT if told.reached_loss is None else number_text(told.reached_loss)
    words = f"It was to end once the {told.by} loss is {number_text(told.loss)}: "
    words += f"{'reached' if told.reached else 'not reached'}, {last} in the end."
    parts = [tag("p", words)]
    if phases:
        heads = ("steps", "a step predicted", "measured", "own steps a step", "rate times")
        head = ["from step", "ranks", "micro-batches", "plan", *map(number_head, heads)]
        parts.append(table("Phases", head, map(_row, phases)))
    if chosen is not None:
        noise = "drowns the gradient" if chosen.scale is None else f"{chosen.scale:.4g} samples"
        parts.append(tag("p", f"Chosen: {chosen.why}.  Noise scale: {noise}.", class_="note"))
        parts.append(_both(told, chosen))
    yield section("To the loss", *parts)


def _row(phase: PhaseTold) -> Markup:
    figures = (
        f"{phase.steps:,}",
        seconds_text(phase.predicted_s),
        seconds_text(phase.step_s) if phase.step_s else ABSENT,
        f"{phase.gain:.2f}",
        f"{phase.factor:.2f}",
    )
    words = f"{phase.step:,}", f"{phase.ranks}", f"{phase.micro_batches}", phase.plan
    return tag("tr", *(tag("td", word) for word in words), *map(figure_cell, figures))


def _both(told: UntilTold, chosen: ChoiceTold) -> Markup:
    rows = (
        ("a step", chosen.step_s, told.step_s, seconds_text),
        ("the job's own steps, in all", chosen.own, told.own_steps, _plain),
        ("seconds, from the first phase on", chosen.seconds, told.seconds, seconds_text),
        (f"cost, in {told.cost_in}", chosen.cost, told.cost, _plain),
    )
    head = ["", number_head("predicted"), number_head("measured")]
    cells = (
        tag("tr", tag("td", name), *(figure_cell(words(each)) for each in (guess, found)))
        for name, guess, found, words in rows
    )
    return table("To the loss, as foreseen at the choice, and as it was", head, cells)


def _plain(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4g}"
