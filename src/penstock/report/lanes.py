"""Lanes: the picture of the timelines, one above the other on the same time scale.

One path per kind of action and clock, not one element per span.  Area is time: a span at least
2 pixels wide is a rectangle; narrower ones fill their pixel columns from below, by the share of
the column's time that each kind has, at least a pixel high.  page.js draws by the same rule when
the picture is zoomed (tests/report/test_browser.py compares the two).
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.figure_words import seconds_text
from penstock.report.markup import Markup, tag
from penstock.report.scale import Floats, Scale, ticks, time_labels
from penstock.report.thin import Drawn, begin_s, drawn_spans
from penstock.timeline.spans import LANES, SPAN_KINDS, Lane, Spans
from penstock.timeline.timeline import Timeline, num_steps, step_s

WIDTH, LEFT, RIGHT = 1120, 76, 20
TITLE, AXIS, BLOCK_GAP = 26, 26, 14
WIDE = 2.0  # pixels from which a span is a rectangle of its own
MAX_LABELS = 1500
LETTER = 6.6  # pixels
TICKS = 10**9  # times are written as whole numbers of this part of the drawn time
WORK: tuple[Lane, ...] = ("compute", "update")
BESIDE: tuple[tuple[Lane, ...], ...] = (("copy",), ("send",), ("receive",), ("collective",))


class LaneRow(NamedTuple):
    """One lane of one rank: where it stands, and its spans in order of their start."""

    rank: int
    lane: str
    top: float
    height: float
    kinds: NDArray[np.uint8]
    stages: NDArray[np.int32]
    micro_batches: NDArray[np.int32]
    starts: NDArray[np.int64]  # in TICKS of the drawn time
    ends: NDArray[np.int64]


class Block(NamedTuple):
    """The rows of one clock."""

    name: str
    text: str
    top: float
    bottom: float
    end: int  # of the step, in TICKS
    rows: tuple[LaneRow, ...]


class Picture(NamedTuple):
    """The laid out timelines of all clocks."""

    blocks: tuple[Block, ...]
    whole_s: float
    height: float
    short: bool  # every rank has one stage, of its own number: "F3" will do for a name


class _LaneFrame(NamedTuple):
    """What the blocks of all clocks share."""

    ranks: tuple[int, ...]
    lanes: tuple[tuple[Lane, ...], ...]  # of every rank, from above
    whole_s: float


def lay_out(clocks: Sequence[tuple[str, Timeline]], drawn: Drawn) -> Picture:
    """Return the picture of the drawn part of the timelines; each begins at its first span.

    Lanes on which nothing happens in any clock are left out.
    """
    whole_s = min(drawn.until_s, max((step_s(timeline) for _, timeline in clocks), default=0.0))
    chosen = [(name, timeline, drawn_spans(timeline, drawn)) for name, timeline in clocks]
    used = {lane for at, lane in enumerate(LANES) for _, _, s in chosen if (s.lanes == at).any()}
    lanes = (WORK, *(lane for lane in BESIDE if used & set(lane)))
    grid = _LaneFrame(drawn.ranks, lanes, whole_s)
    blocks = list[Block]()
    for name, timeline, spans in chosen:
        top = blocks[-1].bottom + BLOCK_GAP if blocks else 0.0
        rows = tuple(_rows(spans, begin_s(timeline), grid, top + TITLE))
        bottom = rows[-1].top + rows[-1].height if rows else top + TITLE
        end = int(_to_ticks(np.array([step_s(timeline)]), whole_s)[0])
        blocks.append(Block(name, _title(name, timeline), top, bottom, end, rows))
    height = AXIS + (blocks[-1].bottom if blocks else 0.0)
    return Picture(tuple(blocks), whole_s, height, all(_own_stage(s) for _, _, s in chosen))


def _title(name: str, timeline: Timeline) -> str:
    steps = num_steps(timeline)
    window = "one step" if steps == 1 else f"a window of {steps:,} steps"
    return f"{name.capitalize()}: {window}, {seconds_text(step_s(timeline))}"


def _own_stage(spans: Spans) -> bool:
    own = spans.working()
    return bool((spans.stages[own] == spans.ranks[own]).all())


def _rows(spans: Spans, zero_s: float, grid: _LaneFrame, top: float) -> Iterator[LaneRow]:
    """Yield the rows of one clock from `top` on, those of a rank close together."""
    tall, thin, gap = _heights(len(grid.ranks))
    by_start = np.lexsort((spans.ends_s, spans.starts_s))
    keys = (spans.ranks * len(LANES) + spans.lanes)[by_start]
    for rank in grid.ranks:
        for lane in grid.lanes:
            at = by_start[np.isin(keys, [rank * len(LANES) + LANES.index(name) for name in lane])]
            height = tall if lane is WORK else thin
            starts = _to_ticks(spans.starts_s[at] - zero_s, grid.whole_s)
            ends = _to_ticks(spans.ends_s[at] - zero_s, grid.whole_s)
            columns = spans.kinds[at], spans.stages[at], spans.micro_batches[at], starts, ends
            yield LaneRow(rank, lane[0], top, height, *columns)
            top += height + 1
        top += gap


def _heights(num_ranks: int) -> tuple[float, float, float]:
    """Return the pixels of a compute lane, of another lane, and between ranks."""
    if num_ranks <= 4:
        return 26, 7, 9
    return (18, 5, 6) if num_ranks <= 16 else (12, 3, 4)


def _to_ticks(times_s: Floats, whole_s: float) -> NDArray[np.int64]:
    if whole_s <= 0:
        return np.zeros(len(times_s), np.int64)
    return np.minimum(times_s / whole_s * TICKS, 2 * TICKS).round().astype(np.int64)


def draw(picture: Picture) -> Markup:
    """Return the picture as SVG of 1120 pixels, all of the drawn time."""
    scale = Scale(0.0, float(TICKS), LEFT, WIDTH - RIGHT)
    return tag(
        "svg",
        tag("title", "Timelines of every rank: " + "; ".join(b.text for b in picture.blocks)),
        tag("g", *_tracks(picture, scale), class_="tracks"),
        tag("g", *_grid(picture, scale), id="grid"),
        *(tag("g", *_paths(block, scale), class_="spans") for block in picture.blocks),
        tag("g", *_labels(picture, scale), id="names"),
        tag("g", *_fixed_texts(picture)),
        tag("g", *_ends(picture, scale), id="ends"),
        viewBox=f"0 0 {WIDTH} {picture.height:g}",
        id="lanes",
        role="img",
        aria_label="Timelines, predicted and measured, one row per lane of a rank",
    )


def _tracks(picture: Picture, scale: Scale) -> Iterator[Markup]:
    for block in picture.blocks:
        right = min(scale.of(block.end), scale.end)
        rows = (
            f"M{scale.start:.1f} {row.top:g}h{right - scale.start:.1f}v{row.height:g}"
            f"H{scale.start:.1f}z"
            for row in block.rows
        )
        yield tag("path", d="".join(rows), class_="track")


def _grid(picture: Picture, scale: Scale) -> Iterator[Markup]:
    if not picture.blocks or not picture.whole_s > 0:
        return
    marks_s = ticks(0.0, picture.whole_s, about=10)
    bottom = picture.blocks[-1].bottom
    pixels = scale(np.array(marks_s) / picture.whole_s * TICKS).tolist()
    lines = (f"M{x:.1f} {TITLE - 4}V{bottom + 4:g}" for x in pixels)
    yield tag("path", d="".join(lines), class_="grid")
    for x, text in zip(pixels, time_labels(marks_s), strict=True):
        yield tag("text", text, x=f"{x:.1f}", y=f"{bottom + 19:g}", text_anchor="middle")


def _paths(block: Block, scale: Scale) -> Iterator[Markup]:
    drawn = [list[str]() for _ in SPAN_KINDS]
    counts = np.zeros(len(SPAN_KINDS), np.int64)
    for row in block.rows:
        counts += np.bincount(row.kinds, minlength=len(SPAN_KINDS))
        for kind, path in _rectangles(row, scale):
            drawn[kind].append(path)
    for kind, word in enumerate(SPAN_KINDS):
        title = tag("title", f"{word}: {int(counts[kind]):,} spans, {block.name}")
        yield tag("path", title, d="".join(drawn[kind]), class_=f"span {word}")


def _rectangles(row: LaneRow, scale: Scale) -> Iterator[tuple[int, str]]:
    """Yield the kind and the path of what is drawn of one row, wide spans first."""
    lefts, rights = (scale(t.astype(np.float64)) for t in (row.starts, row.ends))
    rights = np.minimum(rights, scale.end)
    widths = rights - lefts
    wide = widths >= WIDE
    shown = widths - np.minimum(1, widths / 8)  # neighbours stay apart
    where = f"{row.top:g}", f"v{row.height:g}"
    for kind, x, width in zip(
        row.kinds[wide].tolist(), lefts[wide].tolist(), shown[wide].tolist(), strict=True
    ):
        yield kind, f"M{x:.1f} {where[0]}h{width:.1f}{where[1]}h{-width:.1f}z"
    yield from _columns(row, lefts[~wide] - scale.start, rights[~wide] - scale.start, ~wide)


def _columns(
    row: LaneRow, lefts: Floats, rights: Floats, thin: NDArray[np.bool_]
) -> Iterator[tuple[int, str]]:
    """Yield the columns that narrow spans fill, in pixels from the left end of the scale."""
    if not len(lefts):
        return
    kinds = row.kinds[thin]
    shares = np.zeros((WIDTH - LEFT - RIGHT + 4, len(SPAN_KINDS)))
    for k in range(3):  # a span of less than 2 pixels lies in at most 3 columns
        column = np.floor(lefts) + k
        part = np.minimum(rights, column + 1) - np.maximum(lefts, column)
        at = np.minimum(column, len(shares) - 1).astype(np.int64)
        np.add.at(shares, (at, kinds), np.maximum(part, 0))
    shares /= np.maximum(shares.sum(axis=1), 1)[:, None]
    bottom, least = row.top + row.height, 1 / row.height
    for column in np.flatnonzero(shares.sum(axis=1) > 1e-6).tolist():
        y = bottom
        for kind in np.flatnonzero(shares[column]).tolist():
            height = row.height * max(float(shares[column, kind]), least)
            y -= height
            yield kind, f"M{column + LEFT} {y:.1f}h1v{height:.1f}h-1z"


def _labels(picture: Picture, scale: Scale) -> Iterable[Markup]:
    rows = [row for block in picture.blocks for row in block.rows if row.lane == "compute"]
    labels = [label for row in rows if row.height > 12 for label in _names(row, scale, picture)]
    return labels if len(labels) <= MAX_LABELS else ()


def _names(row: LaneRow, scale: Scale, picture: Picture) -> Iterator[Markup]:
    lefts, rights = (scale(t.astype(np.float64)) for t in (row.starts, row.ends))
    y = f"{row.top + row.height / 2 + 4:g}"
    for at in np.flatnonzero(rights - lefts >= LETTER + 3).tolist():
        kind = SPAN_KINDS[int(row.kinds[at])]
        stage, number = int(row.stages[at]), int(row.micro_batches[at])
        width = float(min(rights[at], scale.end) - lefts[at])
        names = (f"{kind}{number}" if picture.short else f"{kind}{stage}.{number}", f"{number}")
        text = next((name for name in names if len(name) * LETTER + 3 <= width), None)
        if text is not None:
            x = f"{lefts[at] + width / 2:.1f}"
            yield tag("text", text, x=x, y=y, class_=f"on {kind}")


def _fixed_texts(picture: Picture) -> Iterator[Markup]:
    for block in picture.blocks:
        yield tag("text", block.text, x=LEFT, y=f"{block.top + 15:g}", class_="block")
        for row in block.rows:
            if row.lane == "compute":
                y = f"{row.top + row.height / 2 + 4:g}"
                text = f"rank {row.rank}"
                yield tag("text", text, x=LEFT - 8, y=y, text_anchor="end", class_="rank")


def _ends(picture: Picture, scale: Scale) -> Iterator[Markup]:
    """Yield the end of the step by each clock, through both blocks."""
    if len(picture.blocks) < 2:
        return
    for block in picture.blocks:
        x = f"{scale.of(block.end):.1f}"
        path = f"M{x} {TITLE - 4}V{picture.blocks[-1].bottom + 4:g}"
        shown = block.end <= TICKS
        title = tag("title", f"end of the step, {block.name}")
        yield tag("path", title, d=path if shown else "", class_=f"end {block.name}")


def script_data(picture: Picture) -> str:
    """Return the JSON that page.js zooms and names spans with; holds no "<".

    Of every span: kind, stage, micro-batch, start since the start before, length.
    """
    blocks = [
        {
            "name": block.name,
            "end": block.end,
            "bottom": block.bottom,
            "rows": [
                {
                    "rank": row.rank,
                    "lane": row.lane,
                    "top": row.top,
                    "height": row.height,
                    "spans": _columns_of(row),
                }
                for row in block.rows
            ],
        }
        for block in picture.blocks
    ]
    about = {
        "whole_s": picture.whole_s,
        "short": picture.short,
        "ticks": TICKS,
        "left": LEFT,
        "right": RIGHT,
        "title": TITLE,
        "letter": LETTER,
        "max_labels": MAX_LABELS,
        "kinds": SPAN_KINDS,
        "blocks": blocks,
    }
    return json.dumps(about, separators=(",", ":")).replace("<", "\\u003c")


def _columns_of(row: LaneRow) -> list[int]:
    since = np.diff(row.starts, prepend=0)
    columns = (row.kinds, row.stages, row.micro_batches, since, row.ends - row.starts)
    return np.stack([c.astype(np.int64) for c in columns], axis=1).ravel().tolist()
