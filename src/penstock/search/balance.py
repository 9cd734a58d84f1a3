"""Balance: where to cut so that the slowest stage is as fast as it can be."""

import bisect
import itertools
from collections.abc import Sequence

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
    bounds = _seconds_before(graph, op_s)
    return _bottleneck(bounds, [point.forward_bytes for point in points], num_stages)


def _seconds_before(graph: Graph, op_s: Sequence[float]) -> list[float]:
    """Return the seconds of all ops before each cut point; first 0, last those of all."""
    places = [point.at for point in graph.cut_points]
    per_piece = [0.0] * (len(places) + 1)
    for i, node in enumerate(graph.nodes):
        place = node.origin if node.phase == "B" and node.origin >= 0 else min(i, graph.loss)
        per_piece[bisect.bisect_right(places, place)] += op_s[i]
    return [0.0, *itertools.accumulate(per_piece)]


def _bottleneck(before: Sequence[float], sizes: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Return indices of cut points; before[k + 1] - before[k] is the time of piece k."""
    pieces = len(before) - 1
    best: list[tuple[float, int, tuple[int, ...]]] = [
        (before[end], 0, ()) for end in range(pieces + 1)
    ]
    for stages in range(2, num_stages + 1):
        following: list[tuple[float, int, tuple[int, ...]]] = []
        for end in range(pieces + 1):
            options = (
                (
                    max(best[k][0], before[end] - before[k]),
                    best[k][1] + sizes[k - 1],
                    (*best[k][2], k - 1),
                )
                for k in range(stages - 1, end)
            )
            following.append(min(options, default=(float("inf"), 0, ())))
        best = following
    return best[pieces][2]
