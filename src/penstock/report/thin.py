"""Thinning: what is drawn of a timeline or curve that has more points than a page can carry."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.scale import Floats
from penstock.timeline.spans import Spans
from penstock.timeline.timeline import Timeline

MAX_RANKS = 32
FEW_RANKS = 8
MAX_SPANS = 60_000  # of one clock: about 1 MB of page


class Drawn(NamedTuple):
    """The part of the timelines that is drawn: some ranks; their beginning if not `whole`."""

    ranks: tuple[int, ...]
    until_s: float
    whole: bool


def choose(timelines: Sequence[Timeline], max_spans: int = MAX_SPANS) -> Drawn:
    """Return the ranks and seconds of `timelines` that are drawn, the same for all.

    At most 32 ranks, evenly spaced with the first and the last.  If one of the timelines then
    has more than `max_spans` spans, fewer ranks, down to 8; then only the beginning of the time.
    """
    num_ranks = max((timeline.num_ranks for timeline in timelines), default=0)
    per_rank = [
        np.bincount(timeline.spans.ranks, minlength=num_ranks) for timeline in timelines
    ] or [np.zeros(num_ranks, np.int64)]
    count = min(num_ranks, MAX_RANKS)
    ranks = even_ranks(num_ranks, count)
    while max(int(c[list(ranks)].sum()) for c in per_rank) > max_spans and count > FEW_RANKS:
        count = max(FEW_RANKS, count // 2)
        ranks = even_ranks(num_ranks, count)
    ends_s = [_until_s(timeline, ranks, max_spans) for timeline in timelines]
    until_s = min(ends_s, default=math.inf)
    return Drawn(ranks, until_s, whole=until_s == math.inf)


def even_ranks(num_ranks: int, count: int = MAX_RANKS) -> tuple[int, ...]:
    """Return at most `count` ranks, evenly spaced, the first and the last among them."""
    ranks = np.linspace(0, max(0, num_ranks - 1), min(num_ranks, count))
    return tuple(ranks.round().astype(np.int64).tolist())


def begin_s(timeline: Timeline) -> float:
    """Return when the first span starts: the zero of the page's time; 0.0 without spans."""
    return float(timeline.spans.starts_s.min()) if len(timeline.spans) else 0.0


def drawn_spans(timeline: Timeline, drawn: Drawn) -> Spans:
    """Return the spans of `timeline` that `drawn` names."""
    spans = timeline.spans
    within = spans.starts_s - begin_s(timeline) < drawn.until_s
    return spans.where(np.isin(spans.ranks, drawn.ranks) & within)


def envelope(xs: Floats, ys: Floats, *, columns: int) -> NDArray[np.int64]:
    """Return the indices of at most 4 * `columns` points, for a curve `columns` pixels wide.

    `xs` does not decrease.  Of every column: its first and last point, its minimum and its maximum;
    so no peak is lost.
    """
    if len(xs) <= 4 * columns:
        return np.arange(len(xs))
    width = (float(xs[-1]) - float(xs[0])) / columns
    at = np.minimum((xs - xs[0]) / width, columns - 1).astype(np.int64) if width > 0 else 0 * xs
    firsts = np.flatnonzero(np.diff(at, prepend=-1))
    lasts = np.append(firsts[1:], len(xs)) - 1
    kept = [firsts, lasts]
    order = np.lexsort(
        (ys, at)
    )  # by column, then by value: the ends of a run are least and greatest
    kept += [order[firsts], order[lasts]]
    return np.unique(np.concatenate(kept))


def _until_s(timeline: Timeline, ranks: tuple[int, ...], max_spans: int) -> float:
    spans = timeline.spans
    starts_s = spans.starts_s[np.isin(spans.ranks, ranks)]
    if len(starts_s) <= max_spans:
        return math.inf
    return float(np.partition(starts_s, max_spans)[max_spans]) - begin_s(timeline)
