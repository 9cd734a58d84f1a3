"""Balance: where to cut so that the slowest stage is as fast as it can be."""

import bisect
import itertools
from collections.abc import Sequence
from math import inf

from penstock.errors import PlanError
from penstock.graph.graph import Graph


def balanced_cuts(graph: Graph, op_s: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return the cut points that make the slowest stage fastest, and of those the fewest bytes.

    A stage's seconds are those of its forward and backward ops: `op_s`, one for each node.
    Exact, by dynamic programming over (stages, cut points): O(num_stages * n^2) for n cut points.
    Ignores:  messages (they break ties), ops that are repeated in several stages.
    Raises:   PlanError: fewer cut points than needed.
    """
    points = graph.cut_points
    if num_stages - 1 > len(points):
        raise PlanError(
            f"{num_stages} stages need {num_stages - 1} cut points; the model has {len(points)}",
            hint=f"use at most {len(points) + 1} stages",
        )
    before = _seconds_before(graph, op_s)
    slowest = _least_slowest(before, num_stages)
    return _fewest_bytes(before, [p.forward_bytes for p in points], num_stages, slowest)


def stage_seconds(graph: Graph, op_s: Sequence[float], cuts: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of each stage's forward and backward ops, if cut at `cuts`."""
    before = _seconds_before(graph, op_s)
    ends = [0, *(c + 1 for c in cuts), len(before) - 1]
    return tuple(before[b] - before[a] for a, b in itertools.pairwise(ends))


def _seconds_before(graph: Graph, op_s: Sequence[float]) -> list[float]:
    """Return the seconds of all ops before each cut point; first 0, last those of all."""
    places = [point.at for point in graph.cut_points]
    per_piece = [0.0] * (len(places) + 1)
    for i, node in enumerate(graph.nodes):
        place = node.origin if node.phase == "B" and node.origin >= 0 else min(i, graph.loss)
        per_piece[bisect.bisect_right(places, place)] += op_s[i]
    return [0.0, *itertools.accumulate(per_piece)]


def _least_slowest(before: Sequence[float], num_stages: int) -> float:
    """Return the least seconds that the slowest of `num_stages` stages can have.

    before[k + 1] - before[k] is the time of piece k; a stage is one or more pieces.
    """
    pieces = len(before) - 1
    best = list(before)  # of the first pieces, up to each, as one stage
    for stages in range(2, num_stages + 1):
        best = [
            min(
                (max(best[k], before[end] - before[k]) for k in range(stages - 1, end)), default=inf
            )
            for end in range(pieces + 1)
        ]
    return best[pieces]


def _fewest_bytes(
    before: Sequence[float], sizes: Sequence[int], num_stages: int, slowest: float
) -> tuple[int, ...]:
    """Return the cuts over which fewest bytes cross, of those with no stage slower than `slowest`.

    sizes[k] cross between pieces k and k + 1.  Of several, the first in dictionary order.
    """
    pieces = len(before) - 1
    best = [(0.0, ()) if seconds <= slowest else (inf, ()) for seconds in before]
    for stages in range(2, num_stages + 1):
        following: list[tuple[float, tuple[int, ...]]] = []
        for end in range(pieces + 1):
            options = (
                (best[k][0] + sizes[k - 1], (*best[k][1], k - 1))
                for k in range(stages - 1, end)
                if before[end] - before[k] <= slowest
            )
            following.append(min(options, default=(inf, ())))
        best = following
    return best[pieces][1]
