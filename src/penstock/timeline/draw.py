"""Draw a timeline as text: a line per rank, a column per unit of time."""

import numpy as np

from penstock.timeline.spans import Spans
from penstock.timeline.timeline import Timeline, step_s

MAX_COLUMNS = 400


def draw(timeline: Timeline, *, unit_s: float | None = None) -> str:
    """Return a picture of computes and updates: a line per rank, a column per `unit_s` seconds.

    A column shows what runs at its middle: "F0" (forward of micro-batch 0) in the column where it
    starts, "-" where it goes on, "." where the rank idles.  Where a rank has a stage of another
    number than its own, stages are shown too: "F2.0".  With backwards of two seconds:

        rank 0  F0 F1 .  .  B0 -  .  B1 -
        rank 1  .  F0 B0 -  F1 B1 -  .  .

    `unit_s` is by default the shortest compute, but so long that there are at most 400 columns.
    Spans without length are not drawn, and of spans shorter than a unit only some.
    Raises:   ValueError: `unit_s` is not positive.
    """
    if unit_s is not None and not unit_s > 0:
        raise ValueError(f"unit_s is {unit_s} s; a column needs a positive one")
    spans = timeline.spans
    drawn = spans.where(spans.working() & (spans.ends_s > spans.starts_s))
    if unit_s is None:
        shortest_s = float((drawn.ends_s - drawn.starts_s).min()) if len(drawn) else 1.0
        unit_s = max(shortest_s, step_s(timeline) / MAX_COLUMNS)
    begin_s = float(spans.starts_s.min()) if len(spans) else 0.0
    cells = _cells(timeline.num_ranks, drawn, begin_s, unit_s)
    width = max((len(cell) for row in cells for cell in row), default=1)
    digits = len(f"{timeline.num_ranks - 1}")
    lines = (
        f"rank {rank:<{digits}}  {' '.join(f'{cell:{width}}' for cell in row)}"
        for rank, row in enumerate(cells)
    )
    return "\n".join(line.rstrip() for line in lines)


def _cells(num_ranks: int, drawn: Spans, begin_s: float, unit_s: float) -> list[list[str]]:
    """Return the text of every column of every rank; spans that hold no middle get none."""
    long = bool((drawn.stages != drawn.ranks).any())
    firsts, lasts = (
        np.ceil((times_s - begin_s) / unit_s - 0.5 - 1e-6).astype(np.int64)
        for times_s in (drawn.starts_s, drawn.ends_s)
    )
    cells = [["."] * int(lasts.max(initial=0)) for _ in range(num_ranks)]
    for span, first, last in zip(drawn, firsts.tolist(), lasts.tolist(), strict=True):
        if last > first:
            row = cells[span.rank]
            row[first:last] = ["-"] * (last - first)
            row[first] = span.name if long else f"{span.kind}{span.micro_batch}"
    return cells
