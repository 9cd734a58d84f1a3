"""Compare: predicted and measured seconds and counts, per rank and per kind of action."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.inputs import Pair
from penstock.timeline.spans import LANES, SPAN_KINDS
from penstock.timeline.timeline import Timeline, busy_s, step_s

SENT, RECEIVED = len(SPAN_KINDS), len(SPAN_KINDS) + 1
WHATS = (*SPAN_KINDS, "sent", "received")


class TimeRow(NamedTuple):
    """One thing that a rank (None: all of them) spends time on; None where a clock is missing."""

    rank: int | None
    what: str
    counts: tuple[int | None, int | None]
    seconds: Pair


class Sums(NamedTuple):
    """Of one timeline, for every rank and each of WHATS: how many spans, how many seconds."""

    counts: NDArray[np.int64]
    seconds: NDArray[np.float64]


def compare(
    predicted: Timeline | None, measured: Timeline | None, ranks: tuple[int, ...]
) -> tuple[TimeRow, ...]:
    """Return the rows for all ranks together, then for each of `ranks`.

    What occurs in neither timeline is left out.
    For all ranks: counts are sums, seconds are means over the ranks.  "waiting" is the step less
    computes and updates; "step" is from the first start to the last end on any rank.
    """
    timelines = (predicted, measured)
    sums = tuple(None if t is None else _sums(t) for t in timelines)
    occurs = sum((s.counts.sum(axis=0) for s in sums if s is not None), np.zeros(len(WHATS)))
    rows: list[TimeRow] = []
    for rank in (None, *ranks):
        for at in np.flatnonzero(occurs):
            counts, seconds = zip(*(_figures(s, rank, int(at)) for s in sums), strict=True)
            rows.append(TimeRow(rank, WHATS[at], (counts[0], counts[1]), Pair(*seconds)))
        for what in ("waiting", "step"):
            seconds = [None if t is None else _whole(t, rank, what) for t in timelines]
            rows.append(TimeRow(rank, what, (None, None), Pair(*seconds)))
    return tuple(rows)


def _sums(timeline: Timeline) -> Sums:
    spans = timeline.spans
    what = spans.kinds.astype(np.int64)
    what[spans.lanes == LANES.index("send")] = SENT
    what[spans.lanes == LANES.index("receive")] = RECEIVED
    cells = spans.ranks * len(WHATS) + what
    shape = timeline.num_ranks, len(WHATS)
    size = shape[0] * shape[1]
    counts = np.bincount(cells, minlength=size)
    seconds = np.bincount(cells, spans.ends_s - spans.starts_s, minlength=size)
    return Sums(counts.reshape(shape), seconds.astype(np.float64).reshape(shape))


def _figures(sums: Sums | None, rank: int | None, at: int) -> tuple[int | None, float | None]:
    if sums is None or (rank is not None and rank >= len(sums.counts)):
        return None, None
    if rank is None:
        ranks = max(1, len(sums.counts))
        return int(sums.counts[:, at].sum()), float(sums.seconds[:, at].sum()) / ranks
    return int(sums.counts[rank, at]), float(sums.seconds[rank, at])


def _whole(timeline: Timeline, rank: int | None, what: str) -> float | None:
    if rank is not None and rank >= timeline.num_ranks:
        return None
    ranks = range(timeline.num_ranks) if rank is None else (rank,)
    whole_s = step_s(timeline)
    if what == "step" or not ranks:
        return whole_s
    return whole_s - sum(busy_s(timeline, r) for r in ranks) / len(ranks)
