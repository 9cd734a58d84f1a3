"""Balance: where to cut so that the slowest stage is as fast as possible, on its own device."""

import itertools
from collections.abc import Sequence
from math import inf, isinf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.graph.graph import Graph

Floats = NDArray[np.float64]


class StageEnds(NamedTuple):
    """Cut points at which a stage has to end, and those at which none may."""

    required: frozenset[int] = frozenset()
    forbidden: frozenset[int] = frozenset()

    def allow(self, first: int, end: int, pieces: int) -> bool:
        """Return whether pieces `first` to `end` - 1 of so many may be a stage."""
        inside = any(first < cut + 1 < end for cut in self.required)
        return not inside and (end == pieces or end - 1 not in self.forbidden)


ANYWHERE = StageEnds()


def balanced_cuts(
    graph: Graph, op_s: Sequence[float], num_stages: int, ends: StageEnds = ANYWHERE
) -> tuple[int, ...]:
    """Return the cut points that make the slowest stage fastest, and of those the fewest bytes.

    A stage's seconds are those of its forward and backward ops: `op_s`, one for each node.
    Exact, by dynamic programming over (stages, cut points): O(num_stages * n^2) for n cut points.
    Ignores:  messages (they break ties), ops that are repeated in several stages.
    Raises:   PlanError: fewer cut points than needed; no such stages that end where `ends` says.
    """
    return balanced_cuts_on(graph, (op_s,), ((0,),) * num_stages, ends=ends)


def balanced_cuts_on(
    graph: Graph,
    op_s: Sequence[Sequence[float]],
    devices: Sequence[Sequence[int]],
    portions: Sequence[float] = (),
    ends: StageEnds = ANYWHERE,
) -> tuple[int, ...]:
    """Return what `balanced_cuts` does, where stage s runs on the kinds of device devices[s].

    op_s[kind] has the seconds of each node on that kind; where a stage runs on several, the slowest
    counts.  A rank does `portions[s]` of all micro-batches of a stage; default: all.
    Ignores and raises as it.
    """
    points = graph.cut_points
    if len(devices) - 1 > len(points):
        raise PlanError(
            f"{len(devices)} stages need {len(devices) - 1} cut points; "
            f"the model has {len(points)}",
            hint=f"use at most {len(points) + 1} stages",
        )
    by_kind = [np.array(seconds_before(graph, seconds)) for seconds in op_s]
    allowed = _allowed(ends, len(points) + 1)
    took: dict[tuple[float, tuple[int, ...]], Floats] = {}
    parts = portions or (1.0,) * len(devices)
    stages = [(part, tuple(kinds)) for part, kinds in zip(parts, devices, strict=True)]
    for part, kinds in stages:
        if (part, kinds) not in took:
            took[part, kinds] = _took([part * by_kind[kind] for kind in kinds], allowed)
    rows = [took[stage] for stage in stages]
    slowest = _least_slowest(rows)
    if isinf(slowest):
        message = f"{len(devices)} stages do not end where rules say"
        raise PlanError(message, hint="ask for more stages, or fewer")
    return _fewest_bytes(rows, [p.forward_bytes for p in points], slowest)


def seconds_before(graph: Graph, op_s: Sequence[float]) -> list[float]:
    """Return the seconds of all ops before each cut point; first 0, last those of all."""
    per_piece = np.bincount(graph.pieces, op_s, len(graph.cut_points) + 1)
    return [0.0, *itertools.accumulate(per_piece.tolist())]


def _allowed(ends: StageEnds, pieces: int) -> NDArray[np.bool_]:
    """Return [first piece, end]: whether pieces first .. end - 1 may be a stage."""
    found = np.triu(np.ones((pieces + 1, pieces + 1), np.bool_), 1)
    for a, b in zip(*np.nonzero(found), strict=True) if any(ends) else ():
        found[a, b] = ends.allow(int(a), int(b), pieces)
    return found


def _took(kinds: Sequence[Floats], allowed: NDArray[np.bool_]) -> Floats:
    """Return [first piece, end]: the seconds of such a stage on the slowest of these kinds."""
    each_s = [before[None, :] - before[:, None] for before in kinds]
    return np.where(allowed, np.max(each_s, axis=0), inf)


def _least_slowest(rows: Sequence[Floats]) -> float:
    """Return the least seconds that the slowest stage can have; a stage is one or more pieces."""
    best = rows[0][0]
    for took in rows[1:]:
        best = np.maximum(best[:, None], took).min(axis=0)
    return float(best[-1])


def _fewest_bytes(rows: Sequence[Floats], sizes: Sequence[int], slowest: float) -> tuple[int, ...]:
    """Return the cuts that fewest bytes cross, of those with no stage slower than `slowest`.

    sizes[k] cross between pieces k and k + 1.  Of several, the first in dictionary order.
    """
    crossing = np.array([0, *sizes, 0], np.float64)  # at the end of each piece; whole numbers
    left = np.full(len(crossing), inf)
    left[-1] = 0.0
    following = [left]  # [piece]: bytes that the stages from there on send
    for took in reversed(rows[1:]):
        ends = np.where(took <= slowest, (crossing + following[0])[None, :], inf)
        following.insert(0, ends.min(axis=1))
    cuts, first = list[int](), 0
    for took, rest in zip(rows[:-1], following[:-1], strict=True):
        each = np.where(took[first] <= slowest, crossing + rest, inf)
        first = int(each.argmin())
        cuts.append(first - 1)
    return tuple(cuts)
