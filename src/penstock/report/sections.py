"""Sections of the page: pictures and tables; a section says so where a part is missing."""

from collections.abc import Iterator, Sequence

import numpy as np

from penstock.plan.tried import headline
from penstock.report import lanes
from penstock.report.charts import Axis, Curve, Level, chart, drawable
from penstock.report.figure_words import (
    ABSENT,
    bytes_text,
    count_text,
    error_of,
    kind_words,
    number_text,
    percent_text,
    seconds_text,
    share_text,
)
from penstock.report.inputs import Inputs, at_rank
from penstock.report.markup import (
    Markup,
    figure_cell,
    folded,
    number_head,
    section,
    swatch,
    table,
    tag,
)
from penstock.report.scale import BYTES, PLAIN, SECONDS
from penstock.report.thin import Drawn, begin_s, choose, drawn_spans, even_ranks
from penstock.timeline.spans import SPAN_KINDS
from penstock.timeline.timeline import Timeline, num_steps, step_s


def timelines(inputs: Inputs) -> Iterator[Markup]:
    """Yield the picture of the timelines with its legend, its buttons and its data."""
    if not inputs.clocks:
        return
    drawn = choose([timeline for _, timeline in inputs.clocks])
    picture = lanes.lay_out(inputs.clocks, drawn)
    intro = (
        "All on one time scale, each from its first action.  A tall lane is a rank's own work; the"
        " thin ones below it are what it sends, what it receives, and collectives, in the colour of"
        " the action whose result they carry."
    )
    yield section(
        "Timelines",
        tag("p", intro),
        *_thinned(inputs, drawn),
        _legend(inputs),
        tag("figure", _buttons(), lanes.draw(picture), id="figure"),
        tag("script", Markup(lanes.script_data(picture)), type="application/json", id="data"),
    )


def _thinned(inputs: Inputs, drawn: Drawn) -> Iterator[Markup]:
    """Yield what was left out of the picture, if anything was."""
    ranks = max(timeline.num_ranks for _, timeline in inputs.clocks)
    parts = list[str]()
    if len(drawn.ranks) < ranks:
        parts.append(f"{len(drawn.ranks)} of {ranks:,} ranks")
    if not drawn.whole:
        parts.append(f"the first {seconds_text(drawn.until_s)}")
    empty = [name for name, t in inputs.clocks if not len(t.spans) and step_s(t) > 0]
    if parts:
        counts = (
            f"{name} {len(drawn_spans(t, drawn)):,} of {count_text(len(t.spans), 'span')}"
            for name, t in inputs.clocks
        )
        text = f"Too much for one page: drawn are {' and '.join(parts)} ({'; '.join(counts)})."
        yield tag("p", text + "  The sums over all ranks leave nothing out.", class_="note")
    for name in empty:
        yield tag("p", f"The {name} timeline has totals only, no spans to draw.", class_="note")


def _legend(inputs: Inputs) -> Markup:
    used = set[int]()
    for _, timeline in inputs.clocks:
        used |= set(np.unique(timeline.spans.kinds).tolist())
    items = [tag("li", swatch(SPAN_KINDS[at]), kind_words(SPAN_KINDS[at])) for at in sorted(used)]
    ends = (f"{name} end of the step" for name, _ in inputs.clocks if len(inputs.clocks) == 2)
    lines = (
        tag("li", tag("span", class_=f"dash {text.split()[0]}", aria_hidden="true"), text)
        for text in ends
    )
    return tag("ul", *items, tag("li", swatch("track"), "waiting"), *lines, class_="legend")


def _buttons() -> Markup:
    buttons = (
        ("in", "Zoom in", "+"),
        ("out", "Zoom out", "\u2212"),
        ("left", "Earlier", "\u2190"),
        ("right", "Later", "\u2192"),
        ("reset", "Whole step", "Reset"),
    )
    return tag(
        "div",
        *(
            tag("button", text, type="button", data_do=do, title=title, aria_label=title)
            for do, title, text in buttons
        ),
        tag("output", id="shown"),
        tag("span", "Drag to zoom; arrow keys go from span to span.", class_="hint", id="keys"),
        class_="buttons",
        hidden=True,
    )


def memory(inputs: Inputs) -> Iterator[Markup]:
    """Yield the curve of held bytes of every rank with its cap, and the table of peaks."""
    if not any(inputs.used.peak_bytes):
        if inputs.clocks:
            yield section("Memory", tag("p", "No held bytes were recorded.", class_="note"))
        return
    ranks = even_ranks(inputs.num_ranks)
    parts = [tag("div", *_memory_charts(inputs, ranks), class_="charts"), _peaks(inputs, ranks)]
    parts += [_by_kind(inputs, ranks)] if inputs.used.held_bytes else []
    parts += [_far(inputs, ranks)] if any(inputs.used.far_bytes) else []
    if inputs.num_ranks > len(ranks):
        left = f"Shown are {len(ranks)} of {inputs.num_ranks:,} ranks."
        parts.insert(0, tag("p", left, class_="note"))
    yield section("Memory", *parts)


def _memory_charts(inputs: Inputs, ranks: Sequence[int]) -> Iterator[Markup]:
    curves = {rank: [*_held(inputs, rank)] for rank in ranks}
    drawn = [curve for rank in ranks for curve in curves[rank]]
    end_s = max((float(curve.xs[-1]) for curve in drawn), default=0.0)
    first_s = min([0.0, *(float(curve.xs[0]) for curve in drawn)])
    most = max((float(curve.ys.max()) for curve in drawn), default=0.0)
    caps = [cap for cap in inputs.used.cap_bytes if cap <= 3 * most]
    y = Axis("", BYTES, 0.0, 1.08 * max([most, *caps]))
    x = Axis("time", SECONDS, first_s, end_s)
    for rank in ranks:
        if not curves[rank]:
            continue
        cap = at_rank(inputs.used.cap_bytes, rank)
        levels = [] if cap is None else [Level("cap", "cap", cap)]
        above = f"cap {bytes_text(cap)}, above the picture" if cap and cap > y.high else ""
        title = f"Bytes held by rank {rank} over time"
        size = 540, 174 if len(ranks) <= 8 else 140
        picture = chart(title, curves[rank], levels, x=x, y=y, size=size)
        yield tag("figure", tag("figcaption", f"Rank {rank}", *key(curves[rank], above)), picture)


def _held(inputs: Inputs, rank: int) -> Iterator[Curve]:
    for name, timeline in inputs.clocks:
        own = timeline.memory.ranks == rank
        times_s = timeline.memory.times_s[own] - begin_s(timeline)
        if len(times_s):
            order = np.argsort(times_s, kind="stable")
            end_s = max(float(times_s.max()), step_s(timeline))
            times_s = np.append(times_s[order], end_s)
            sizes = timeline.memory.sizes_bytes[own][order].astype(np.float64)
            yield Curve(name, name, times_s, np.append(sizes, sizes[-1]), stepped=True)


def key(curves: Sequence[Curve], more: str = "") -> Iterator[Markup]:
    """Yield the line of each curve with its name, and a word more."""
    for curve in curves:
        is_dot = curve.class_.startswith("dots")
        line = tag("path", d="M11 7H11" if is_dot else "M0 7H22", class_=f"curve {curve.class_}")
        sample = tag("svg", line, width=22, height=14, aria_hidden="true", class_="swatch")
        yield tag("span", sample, curve.name, class_="key")
    if more:
        yield tag("span", more, class_="key")


def _peaks(inputs: Inputs, ranks: Sequence[int]) -> Markup:
    heads = ["Predicted peak", "Measured peak", "Error"]
    heads += ["Cap", "Of the cap"] if inputs.used.cap_bytes else []
    head = ("Rank", *map(number_head, heads))
    rows = (_peak_row(inputs, rank) for rank in ranks)
    return table("Peak bytes per rank", head, rows, long=len(ranks) > 16)


def _by_kind(inputs: Inputs, ranks: Sequence[int]) -> Markup:
    """Return a table of the peaks by purpose; activations are what nothing else accounts for."""
    names = [*inputs.used.held_bytes[0]]
    head = ("Rank", *(number_head(name.capitalize()) for name in names))
    rows = (
        tag(
            "tr", tag("th", f"{rank}", scope="row"), *(figure_cell(bytes_text(own[n])) for n in own)
        )
        for rank, own in enumerate(inputs.used.held_bytes)
        if rank in ranks
    )
    return table("Measured peak by what it is for", head, rows, long=len(ranks) > 16)


def _far(inputs: Inputs, ranks: Sequence[int]) -> Markup:
    """Return the bytes of far memory; on a GPU they are pinned in the host's."""
    head = ("Rank", *map(number_head, ("Predicted", "Measured", "Error")))
    rows: list[Markup] = []
    for rank in ranks:
        predicted, measured = (at_rank(sizes, rank) for sizes in inputs.used.far_bytes)
        error = percent_text(error_of(predicted, measured))
        cells = bytes_text(predicted), bytes_text(measured), error
        rows.append(tag("tr", tag("th", f"{rank}", scope="row"), *map(figure_cell, cells)))
    return table("Far memory (on a GPU: pinned in the host's)", head, rows, long=len(ranks) > 16)


def _peak_row(inputs: Inputs, rank: int) -> Markup:
    predicted, measured = (at_rank(sizes, rank) for sizes in inputs.used.peak_bytes)
    cells = [
        bytes_text(predicted),
        bytes_text(measured),
        percent_text(error_of(predicted, measured)),
    ]
    if inputs.used.cap_bytes:
        cap, held = (
            at_rank(inputs.used.cap_bytes, rank),
            measured if measured is not None else predicted,
        )
        share = share_text(held / cap) if cap and held is not None else ABSENT
        cells += [bytes_text(cap), share]
    return tag("tr", tag("th", f"{rank}", scope="row"), *map(figure_cell, cells))


def training(inputs: Inputs) -> Iterator[Markup]:
    """Yield the curves of the loss and of the seconds per step."""
    if not inputs.steps:
        if inputs.measured is not None:
            yield section("Training", tag("p", "No step was recorded.", class_="note"))
        return
    figures = (_loss(inputs), _step_seconds(inputs))
    yield section("Training", *_no_numbers(inputs), tag("div", *figures, class_="charts"))


def _no_numbers(inputs: Inputs) -> Iterator[Markup]:
    losses = np.array([step.loss for step in inputs.steps])
    wrong = [inputs.steps[at].step for at in np.flatnonzero(~drawable(losses)).tolist()]
    if wrong:
        which = ", ".join(map(str, wrong[:8])) + (", ..." if len(wrong) > 8 else "")
        word = "step" if len(wrong) == 1 else "steps"
        text = f"The loss of {word} {which} is not a number that can be drawn"
        yield tag("p", f"{text} ({len(wrong):,} of {len(losses):,}).", class_="note")


def _loss(inputs: Inputs) -> Markup:
    xs = np.array([float(step.step) for step in inputs.steps])
    curve = Curve("loss", "measured", xs, np.array([step.loss for step in inputs.steps]))
    curves = [curve, *_validations(inputs)]
    levels = list[Level]()
    if inputs.val_loss is not None:
        levels.append(Level("validation", "validation", inputs.val_loss))
    picture = chart("Loss of every step", curves, levels, x=Axis("step", PLAIN), y=Axis("", PLAIN))
    return tag("figure", tag("figcaption", "Loss by step"), picture)


def _validations(inputs: Inputs) -> Iterator[Curve]:
    """Yield the curve of the losses of validations, where there were any on the way."""
    told = [(float(step.step), step.val_loss) for step in inputs.steps]
    found = [(step, loss) for step, loss in told if loss is not None]
    if found:
        xs, ys = np.array(found).T
        yield Curve("validation", "validation", xs, ys)


def _step_seconds(inputs: Inputs) -> Markup:
    xs = np.array([float(step.step) for step in inputs.steps])
    seconds = np.array([step.seconds for step in inputs.steps])
    predicted_s = inputs.step_s.predicted
    levels = [] if predicted_s is None else [Level("predicted", "predicted", predicted_s)]
    fit = np.append(seconds[drawable(seconds)], [level.y for level in levels])
    most = 3 * float(np.percentile(fit, 90)) if len(fit) else np.inf
    beyond = int((fit > most).sum())
    y = Axis("", SECONDS, 0.0, most) if beyond else Axis("", SECONDS, 0.0)
    caption = "Seconds per step"
    if beyond:
        worst = seconds_text(float(fit.max()))
        caption += f"; {count_text(beyond, 'step')} above the picture, the slowest {worst}"
    curve = Curve("seconds", "measured", xs, seconds)
    picture = chart("Seconds of every step", [curve], levels, x=Axis("step", PLAIN), y=y)
    return tag("figure", tag("figcaption", caption), picture)


def plan(inputs: Inputs) -> Iterator[Markup]:
    """Yield the decisions with their reasons, the stages, and the plan as text."""
    if inputs.plan is None:
        yield section("Plan", tag("p", "This run has no plan.", class_="note"))
        return
    rows = (
        tag(
            "tr",
            tag("th", d.what, scope="row"),
            *(tag("td", text) for text in (d.value, d.by, d.why)),
        )
        for d in inputs.plan.decisions
    )
    head = ("Decision", "Value", "Taken by", "Why")
    parts = [table("Decisions of the plan", head, rows)]
    if not inputs.plan.decisions:
        parts = [tag("p", "The plan gives no reasons.", class_="note")]
    stages = table("Stages", ("Stage", "Begins", "Recompute"), _stages(inputs), long=True)
    text = tag("pre", str(inputs.plan), tabindex=0, role="region", aria_label="The plan as text")
    lead = tag("p", tag("strong", headline(inputs.plan)))
    yield section("Plan", lead, *parts, folded("Stages", stages), folded("As text", text))


def _stages(inputs: Inputs) -> Iterator[Markup]:
    assert inputs.plan is not None
    starts = ("at the input", *inputs.plan.cut_names)
    for stage, start in enumerate(starts):
        repeats = inputs.plan.stages[stage].recompute
        words = "no" if repeats is False else "yes" if repeats is True else f"{len(repeats)} ops"
        cells = (tag("td", start), tag("td", words))
        yield tag("tr", tag("th", f"{stage}", scope="row"), *cells)


def about(inputs: Inputs) -> Iterator[Markup]:
    """Yield what the job reports, and where the timelines come from."""
    rows = [
        (name, value if isinstance(value, str) else number_text(value))
        for name, value in inputs.facts
    ]
    rows += [(f"{clock} timeline, {k}", v) for clock, t in inputs.clocks for k, v in _meta(t)]
    if rows:
        body = (tag("tr", tag("th", name, scope="row"), tag("td", text)) for name, text in rows)
        yield folded("Also reported", table("Also reported", ("What", "Value"), body))


def _meta(timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield from timeline.meta
    yield "size", f"{timeline}; {count_text(num_steps(timeline), 'step')}"
