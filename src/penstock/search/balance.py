"""Balance: where to cut so that the slowest stage is as fast as possible, on its own device."""

import bisect
import itertools
from collections.abc import Sequence
from math import inf, isinf
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.graph.graph import Graph


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
    by_kind = [seconds_before(graph, seconds) for seconds in op_s]
    parts = portions or (1.0,) * len(devices)
    rows = [
        [[part * before for before in by_kind[kind]] for kind in kinds]
        for part, kinds in zip(parts, devices, strict=True)
    ]
    allowed = _allowed(ends, len(points) + 1)
    slowest = _least_slowest(rows, allowed)
    if isinf(slowest):
        message = f"{len(devices)} stages do not end where rules say"
        raise PlanError(message, hint="ask for more stages, or fewer")
    return _fewest_bytes(rows, [p.forward_bytes for p in points], slowest, allowed)


def seconds_before(graph: Graph, op_s: Sequence[float]) -> list[float]:
    """Return the seconds of all ops before each cut point; first 0, last those of all."""
    places = [point.at for point in graph.cut_points]
    per_piece = [0.0] * (len(places) + 1)
    for i, node in enumerate(graph.nodes):
        place = node.origin if node.phase == "B" and node.origin >= 0 else min(i, graph.loss)
        per_piece[bisect.bisect_right(places, place)] += op_s[i]
    return [0.0, *itertools.accumulate(per_piece)]


_Rows = Sequence[Sequence[Sequence[float]]]  # [stage][kind of it] -> seconds before each piece
_Allowed = Sequence[Sequence[bool]]  # [first piece][end]


def _allowed(ends: StageEnds, pieces: int) -> _Allowed:
    if not any(ends):
        return [[True] * (pieces + 1)] * pieces
    return [[ends.allow(a, b, pieces) for b in range(pieces + 1)] for a in range(pieces)]


def _took(kinds: Sequence[Sequence[float]], first: int, end: int) -> float:
    """Return the seconds of pieces first .. end - 1 on the slowest of these kinds."""
    if len(kinds) == 1:
        return kinds[0][end] - kinds[0][first]
    return max(before[end] - before[first] for before in kinds)


def _least_slowest(rows: _Rows, allowed: _Allowed) -> float:
    """Return the least seconds that the slowest stage can have; a stage is one or more pieces."""
    pieces = len(rows[0][0]) - 1
    best = [_took(rows[0], 0, end) if allowed[0][end] else inf for end in range(pieces + 1)]
    for stages, kinds in enumerate(rows[1:], 2):
        best = [
            min(
                (
                    max(best[k], _took(kinds, k, end))
                    for k in range(stages - 1, end)
                    if allowed[k][end]
                ),
                default=inf,
            )
            for end in range(pieces + 1)
        ]
    return best[pieces]


def _fewest_bytes(
    rows: _Rows, sizes: Sequence[int], slowest: float, allowed: _Allowed
) -> tuple[int, ...]:
    """Return the cuts that fewest bytes cross, of those with no stage slower than `slowest`.

    sizes[k] cross between pieces k and k + 1.  Of several, the first in dictionary order.
    """
    pieces = len(rows[0][0]) - 1
    best: list[tuple[float, tuple[int, ...]]] = [
        (0.0, ()) if allowed[0][end] and _took(rows[0], 0, end) <= slowest else (inf, ())
        for end in range(pieces + 1)
    ]
    for stages, kinds in enumerate(rows[1:], 2):
        following: list[tuple[float, tuple[int, ...]]] = []
        for end in range(pieces + 1):
            options = (
                (best[k][0] + sizes[k - 1], (*best[k][1], k - 1))
                for k in range(stages - 1, end)
                if allowed[k][end] and _took(kinds, k, end) <= slowest
            )
            following.append(min(options, default=(inf, ())))
        best = following
    return best[pieces][1]
