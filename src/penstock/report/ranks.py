"""Ranks: who worked on a run from when to when, what was lost, and what each change cost."""

from collections.abc import Iterator, Sequence

from penstock.report.figure_words import ABSENT, bytes_text, seconds_text
from penstock.report.inputs import Generation, Inputs
from penstock.report.markup import Markup, figure_cell, number_head, section, table, tag
from penstock.units import format_bytes, format_seconds

WIDTH, LEFT, RIGHT, TALL, GAP, FOOT = 1120, 76, 20, 16, 8, 22
_WORDS = {
    "begins": "begins",
    "lost": "lost",
    "left": "left",
    "joined": "joined",
    "moved": "another plan",
}


def ranks(inputs: Inputs) -> Iterator[Markup]:
    """Yield the story of a run whose ranks came and went; nothing of any other."""
    told = inputs.changes.generations
    if not told:
        return
    went = sum(len(each.gone) for each in told)
    intro = (
        f"{len(told)} generations of ranks; {went} of them were lost or left.  A bar is the time"
        " for which a process worked on the run; a line is a change.  The seconds of a change go"
        " from the end of the generation before to the end of the next step."
    )
    end_s = told[-1].time + sum(s.seconds for s in inputs.steps if s.step > told[-1].step + 1)
    yield section(
        "Ranks that came and went",
        tag("p", intro),
        tag("figure", _bars(told, end_s), class_="scroll"),
        _table(told),
        tag("p", f"Last: {told[-1].why or 'as it began'}.", class_="note"),
    )


def _bars(told: Sequence[Generation], end_s: float) -> Markup:
    start_s = told[0].time
    scale = (WIDTH - LEFT - RIGHT) / max(end_s - start_s, 1e-9)
    everyone = sorted({member for each in told for member in each.members})
    children: list[Markup] = []
    ends = [*(each.time for each in told[1:]), end_s]
    for row, member in enumerate(everyone):
        y = row * (TALL + GAP)
        name = tag("text", f"rank {member}", x=0, y=y + TALL - 3, class_="rank")
        children.append(name)
        for each, until_s in zip(told, ends, strict=True):
            if member in each.members:
                x, width = LEFT + (each.time - start_s) * scale, (until_s - each.time) * scale
                words = tag("title", f"generation {each.generation}: {each.plan}")
                shape = {"x": f"{x:.1f}", "y": y, "height": TALL, "width": f"{width:.1f}"}
                children.append(tag("rect", words, class_="span F", **shape))
    foot = len(everyone) * (TALL + GAP)
    for each in told[1:]:
        x = f"{LEFT + (each.time - start_s) * scale:.1f}"
        children.append(tag("line", x1=x, x2=x, y1=0, y2=foot, class_="hatch"))
    for seconds, anchor, x in ((0.0, "start", LEFT), (end_s - start_s, "end", WIDTH - RIGHT)):
        text = format_seconds(seconds)
        children.append(tag("text", text, x=x, y=foot + 14, text_anchor=anchor, class_="rank"))
    title = "Which ranks worked on the run, and when"
    box = f"0 0 {WIDTH} {foot + FOOT}"
    rest = {"class_": "walls", "role": "img", "aria_label": title}
    return tag("svg", tag("title", title), *children, viewBox=box, **rest)


def _table(told: Sequence[Generation]) -> Markup:
    heads = ("agreed", "state in place", "next step", "in all", "moved", "predicted")
    head = ["after step", "what", "ranks", "plan", *map(number_head, heads)]
    return table("Generations", head, [_row(each) for each in told])


def _row(each: Generation) -> Markup:
    who = ", ".join(f"{member} {how}" for member, how in each.gone.items())
    what = _WORDS.get(each.what, each.what) + (f": {who}" if who else "")
    back = f", back to {each.back_to.rpartition('/')[2]}" if each.back_to and each.gone else ""
    is_first = each.what == "begins"
    times = (each.agreed_s, each.ready_s, each.stepped_s, each.cost_s)
    cells = [ABSENT if is_first else seconds_text(one) for one in times]
    cells.append(ABSENT if is_first else bytes_text(each.moved_bytes))
    cells.append(ABSENT if is_first else format_bytes(each.predicted_moved_bytes))
    return tag(
        "tr",
        tag("td", f"{each.step:,}"),
        tag("td", what + back),
        tag("td", ", ".join(map(str, each.members))),
        tag("td", f"{each.plan}{f' ({each.way})' if each.way else ''}"),
        *map(figure_cell, cells),
    )
