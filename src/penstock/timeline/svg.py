"""Draw a timeline as SVG: a row per rank, time to the right, one colour per kind of action."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from penstock.timeline.spans import Span, Spans

if TYPE_CHECKING:
    from penstock.timeline.timeline import Timeline

COLORS = {"F": "#8fb8de", "B": "#9ac58b", "I": "#bcd9b1", "W": "#e6c98f", "U": "#c9a6c4"}
_WIDTH, _LEFT, _TOP, _ROW, _GAP = 1120, 64, 34, 26, 4
_MOST_DRAWN = 10_000  # spans of a picture in a notebook
_LETTER = 6.2  # pixels of a character of a label


def svg_of(timeline: "Timeline", title: str = "") -> str:
    """Return a picture of computes and updates as an SVG document.

    A span is labelled with its micro-batch where there is room; a stage that is not the rank's
    first is darker, the more so the later it is.
    """
    whole_s = timeline.totals.step_s or 1.0
    spans = timeline.spans
    drawn = spans.where(spans.working() & (spans.ends_s > spans.starts_s))
    begin_s = float(drawn.starts_s.min()) if len(drawn) else 0.0
    own = _stages(timeline.num_ranks, drawn)
    scale = (_WIDTH - _LEFT - 10) / whole_s
    height = _TOP + timeline.num_ranks * (_ROW + _GAP) + 30
    parts = [f'<text x="10" y="20" class="t">{escape(title)}</text>']
    for rank in range(timeline.num_ranks):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text x="10" y="{y + 17}">rank {rank}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{whole_s * scale:.1f}" height="{_ROW}" class="i"/>'
        )
    for span in drawn:
        parts += _span(span, own[span.rank], (begin_s, scale))
    parts += _legend({span.kind for span in drawn}, height - 12)
    style = (
        "text{font:12px sans-serif;fill:#222}.t{font-weight:bold}.l{font-size:10px}.i{fill:#eee}"
    )
    size = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}'
        "</svg>\n"
    )


def picture_of(timeline: "Timeline", words: str) -> str:
    """Return the HTML of a timeline for a notebook: its picture, if not very long, and words."""
    below = f"<p>{escape(words)}</p>".replace("\n", "<br>")
    return below if len(timeline.spans) > _MOST_DRAWN else f"{svg_of(timeline)}{below}"


def _stages(num_ranks: int, drawn: Spans) -> list[list[int]]:
    """Return the stages of each rank in increasing order."""
    stages: list[set[int]] = [set() for _ in range(num_ranks)]
    for span in drawn:
        stages[span.rank].add(span.stage)
    return [sorted(own) for own in stages]


def _span(span: Span, stages: list[int], place: tuple[float, float]) -> Iterator[str]:
    begin_s, scale = place
    x, width = _LEFT + (span.start_s - begin_s) * scale, (span.end_s - span.start_s) * scale
    y = _TOP + span.rank * (_ROW + _GAP)
    darker = 0.28 * stages.index(span.stage) / max(1, len(stages) - 1)
    where = f'x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{_ROW}"'
    yield f'<rect {where} fill="{COLORS[span.kind]}" stroke="#fff" stroke-width="0.5"/>'
    if darker:
        yield f'<rect {where} fill="#000" fill-opacity="{darker:.2f}"/>'
    label = str(span.micro_batch)
    if width > _LETTER * len(label) + 2:
        yield (
            f'<text x="{x + width / 2:.2f}" y="{y + 17}" class="l" text-anchor="middle">{label}'
            "</text>"
        )


NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "U": "update",
}


def _legend(kinds: set[str], y: int) -> Iterator[str]:
    x = _LEFT
    for kind, name in NAMES.items():
        if kind in kinds:
            yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLORS[kind]}"/>'
            yield f'<text x="{x + 17}" y="{y}">{kind}: {name}</text>'
            x += 60 + 7 * len(name)
