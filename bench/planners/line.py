"""Line: the best stages on devices that stand in a line, each stage on some that are neighbours.

For every number of stages at once; devices at both ends may stay idle.  Exact.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bench.planners.line_kernel import Arrays, Rules, best_suffixes, line_of
from bench.planners.problem import Groups
from penstock.search.transformer.partition_kernel import Choices, Floats

Order = tuple[int, ...]


class Lined(NamedTuple):
    """The slowest stage or message, the sum of all, where stages end, and their devices."""

    slowest_s: float
    sum_s: float
    ends: tuple[int, ...]
    groups: Groups


def on_line(
    arrays: Arrays,
    order: Order,
    rules: Rules,
    *,
    limit_s: float = math.inf,
    by_sum: bool = False,
) -> list[Lined]:
    """Return, for every number of stages that fits, those whose slowest (or sum) is least.

    limit_s   no stage and no message takes longer
    """
    line = line_of(arrays, np.array(order, np.int64))
    layers, count = len(arrays.sent), len(order)
    most = min(layers, count)
    choice = np.zeros((most + 1, layers + 1, count + 1, count + 1, 2), np.int32)
    best = best_suffixes(arrays, line, rules, limit_s, by_sum, choice)
    found: list[Lined] = []
    for stages in range(1, most + 1):
        values: Floats = best[int(by_sum), stages, 0]
        if values.min() < math.inf:
            start, to = divmod(int(values.argmin()), count + 1)
            slowest_s, sum_s = (float(each[stages, 0, start, to]) for each in best)
            spans = list(_spans(choice, stages, start, to))
            ends = tuple(end for end, _, _ in spans)
            groups = tuple(order[start:to] for _, start, to in spans)
            found.append(Lined(slowest_s, sum_s, ends, groups))
    return found


def front_on_line(arrays: Arrays, order: Order, rules: Rules) -> Iterator[list[Lined]]:
    """Yield all best by sum, then those of which no stage is as slow as in these, and so on."""
    limit_s = math.inf
    while found := on_line(arrays, order, rules, limit_s=limit_s, by_sum=True):
        yield found
        best = min(found, key=lambda one: (one.sum_s, one.slowest_s))
        limit_s = math.nextafter(best.slowest_s, 0.0)


def _spans(choice: Choices, stages: int, start: int, to: int) -> Iterator[tuple[int, int, int]]:
    """Yield of every stage the layer it ends before, and its window of devices."""
    first = 0
    for left in range(stages, 0, -1):
        end, after = map(int, choice[left, first, start, to])
        yield end, start, to
        first, start, to = end, to, after
