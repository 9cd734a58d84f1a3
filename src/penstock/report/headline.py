"""Headline: the report in a few sentences and figures."""

import math
import statistics
from collections.abc import Callable, Iterator

from penstock.plan.tried import OWN, alone_step_s, times_of, tried_rows
from penstock.plan.tried import headline as headline_of
from penstock.report.figure_words import (
    bytes_text,
    count_text,
    error_of,
    flop_text,
    number_text,
    percent_text,
    seconds_text,
    share_text,
)
from penstock.report.inputs import Inputs, Pair, at_rank
from penstock.report.markup import Markup, figure_cell, number_head, table, tag
from penstock.report.wall import found_in
from penstock.timeline.timeline import bubble_fraction

NO_PREDICTION = (
    "This run has no predicted timeline, only what was measured: a job that no plan can train runs"
    " eagerly, and nothing of it is simulated."
)


def sentence(inputs: Inputs) -> str:
    """Return the report in a few sentences."""
    parts = list[str]()
    step = inputs.step_s
    if inputs.plan is not None:
        parts.append(capital(headline_of(inputs.plan)))
    if step.measured is not None:
        parts.append(f"One step took {seconds_text(step.measured)}")
        if step.predicted is not None:
            error = percent_text(error_of(step.predicted, step.measured))
            parts[-1] += f"; {seconds_text(step.predicted)} was predicted ({error})"
    elif step.predicted is not None:
        parts.append(f"One step is predicted to take {seconds_text(step.predicted)}")
    fullest = _fullest(inputs)
    if fullest is not None:
        rank, size_bytes, predicted_bytes, cap_bytes = fullest
        cap = "" if cap_bytes is None else f" of its {bytes_text(cap_bytes)}"
        parts.append(f"The fullest rank, {rank}, held {bytes_text(size_bytes)}{cap}")
        if predicted_bytes is not None:
            error = percent_text(error_of(predicted_bytes, size_bytes))
            parts[-1] += f"; {bytes_text(predicted_bytes)} was predicted ({error})"
    if inputs.val_loss is not None:
        parts.append(f"The validation loss is {number_text(inputs.val_loss)}")
    found = found_in(inputs)
    if found is not None and found.is_named:
        parts.append(f"Bottleneck: {found.title}")
    return " ".join(f"{part}." for part in parts)


def _fullest(inputs: Inputs) -> tuple[int, int, int | None, int | None] | None:
    """Return the rank that held most, its bytes measured, predicted, and its cap."""
    predicted, measured = inputs.used.peak_bytes
    if not measured:
        return None
    rank = max(range(len(measured)), key=measured.__getitem__)
    return rank, measured[rank], at_rank(predicted, rank), at_rank(inputs.used.cap_bytes, rank)


def headline(inputs: Inputs) -> Iterator[Markup]:
    """Yield the headline figures and what a reader must know before believing them."""
    yield tag("dl", *_cards(inputs), class_="cards")
    yield from _alternatives(inputs)
    if inputs.proof.checked is not None:
        yield tag("p", f"Compared with the plain loop: {inputs.proof.checked}.", class_="note")
    if inputs.proof.audited is not None:
        yield tag("p", f"During the run: {inputs.proof.audited}.", class_="note")
    if inputs.predicted is None:
        yield tag("p", NO_PREDICTION, class_="note")
    if inputs.measured is None:
        yield tag("p", "Nothing was measured: this is a prediction.", class_="note")


def capital(text: str) -> str:
    """Return a text with a capital letter first."""
    return text[:1].upper() + text[1:]


def _alternatives(inputs: Inputs) -> Iterator[Markup]:
    """Yield the table of what was tried beside the plan, as it was predicted."""
    if inputs.plan is None or not (rows := tried_rows(inputs.plan)):
        return
    head = "Tried", *map(number_head, ("Step, predicted", "Peak memory")), "Beside this plan"
    body = (
        tag(
            "tr",
            tag("th", capital(row.what), scope="row"),
            figure_cell(seconds_text(row.step_s)),
            figure_cell(bytes_text(row.peak_bytes)),
            tag("td", verdict),
            class_="whole" if verdict == OWN else None,
        )
        for row, verdict in rows
    )
    yield table("What was tried", head, body)


def _total(inputs: Inputs) -> Iterator[Markup]:
    """Yield what all steps took, and how much faster than one process they should be."""
    seconds = [each.seconds for each in inputs.steps if math.isfinite(each.seconds)]
    if not seconds:
        return
    under = [f"for {count_text(len(seconds), 'step')}"]
    alone_s = None if inputs.plan is None else alone_step_s(inputs.plan)
    if inputs.plan is not None and alone_s is not None and inputs.step_s.predicted:
        times = times_of(alone_s, inputs.step_s.predicted)
        under += [f"predicted: {times} one process"] if inputs.plan.total_ranks > 1 else []
    yield card("Total time", seconds_text(math.fsum(seconds)), *under)


def _cards(inputs: Inputs) -> Iterator[Markup]:
    step = inputs.step_s
    yield from _total(inputs)
    if step.measured is not None:
        under = _against(step, seconds_text)
        yield card("Step time", seconds_text(step.measured), *under)
    elif step.predicted is not None:
        yield card("Step time, predicted", seconds_text(step.predicted), "not measured")
    fullest = _fullest(inputs)
    if fullest is not None:
        rank, size_bytes, predicted, cap = fullest
        under = _against(Pair(predicted, size_bytes), bytes_text)
        if cap:
            under.append(f"{share_text(size_bytes / cap)} of {bytes_text(cap)}")
        yield card(f"Peak memory, rank {rank}", bytes_text(size_bytes), *under)
    elif inputs.used.peak_bytes[0]:
        yield card(
            "Peak memory, predicted", bytes_text(max(inputs.used.peak_bytes[0])), "not measured"
        )
    if inputs.clocks:
        bubbles = [share_text(bubble_fraction(t)) for _, t in reversed(inputs.clocks)]
        under = f"predicted {bubbles[1]}" if len(bubbles) == 2 else inputs.clocks[0][0]
        yield card("Time waiting", bubbles[0], under)
    yield from _flop(inputs)
    if inputs.used.joules is not None:
        under = "of all that ran on the machine" + _watts(inputs)
        yield card("Energy of a step", f"{number_text(_rounded(inputs.used.joules))} J", under)
    if inputs.val_loss is not None:
        yield card("Validation loss", number_text(inputs.val_loss))
    yield from _throughput(inputs)


def _watts(inputs: Inputs) -> str:
    """Return the watts of a step, if its seconds are known."""
    joules, step_s = inputs.used.joules, inputs.step_s.measured
    return "" if joules is None or not step_s else f", {number_text(_rounded(joules / step_s))} W"


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


def _flop(inputs: Inputs) -> Iterator[Markup]:
    """Yield the FLOP/s of the model, and what part of its devices' they are (MFU)."""
    peak, own = inputs.used.flop_per_s
    if own is not None:
        most = "" if peak is None else f"{flop_text(peak)} that cluster.toml says"
        under = f"MFU {share_text(own / peak)} of {most}" if peak else "the devices' are not known"
        yield card("Model FLOP/s", flop_text(own), under)


def _throughput(inputs: Inputs) -> Iterator[Markup]:
    for what in ("tokens", "samples"):
        rates = [getattr(step, f"{what}_per_second") for step in inputs.steps]
        known = [rate for rate in rates if rate is not None and math.isfinite(rate)]
        if known:
            under = f"median of {count_text(len(known), 'step')}"
            text = number_text(_rounded(statistics.median(known)))
            yield card(f"{what.capitalize()} per second", text, under)
            return


def _against(figures: Pair, text: Callable[[float | None], str]) -> list[str]:
    """Return the lines under a measured figure: the prediction and its error."""
    if figures.predicted is None:
        return ["not predicted"]
    error = percent_text(error_of(*figures))
    return [f"predicted {text(figures.predicted)}", f"error {error}"]


def card(name: str, value: str, *under: str) -> Markup:
    """Return a figure under its name, with what stands below it."""
    lines = (tag("dd", line, class_="under") for line in under)
    return tag("div", tag("dt", name), tag("dd", value), *lines)
