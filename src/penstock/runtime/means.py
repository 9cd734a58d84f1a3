"""Means: those of figures over micro-batches, as sums and counts and not as means of means.

mean = sum of value_i * weight_i / sum of weight_i      a number, of a micro-batch of that weight
mean = sum of sums / sum of counts                      a pair (sum, count)
"""

import statistics
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from penstock.errors import JobError

_PAIR = 'return numbers, or pairs of a sum and a count: {"accuracy": (correct, answers)}'


@final
class Means:
    """Takes figures of one micro-batch after the other."""

    def __init__(self) -> None:
        self.rows: dict[str, list[tuple[float, float]]] = {}  # values and weights
        self.pairs: dict[str, list[tuple[float, float]]] = {}  # sums and counts

    def add(self, figures: Mapping[str, Any], weight: float) -> None:
        """Take the figures of a micro-batch of so many samples, or of another weight.

        Raises:   JobError: one is neither a number nor a pair of numbers.
        """
        for name, value in figures.items():
            if isinstance(value, tuple | list):
                pair = tuple(_number(name, each) for each in value)  # pyright: ignore
                if len(pair) != 2:
                    raise JobError(f"{name} has {len(pair)} numbers", hint=_PAIR)
                self.pairs.setdefault(name, []).append((pair[0], pair[1]))
            else:
                self.rows.setdefault(name, []).append((_number(name, value), weight))

    def take(self, other: "Means") -> None:
        """Take all that another one has taken."""
        for name, rows in other.rows.items():
            self.rows.setdefault(name, []).extend(rows)
        for name, pairs in other.pairs.items():
            self.pairs.setdefault(name, []).extend(pairs)

    def means(self) -> dict[str, float]:
        """Return the mean of each figure, in the order in which they came; no mean of no count."""
        found = {name: _mean(rows) for name, rows in self.rows.items()}
        counts = {name: sum(count for _, count in rows) for name, rows in self.pairs.items()}
        sums = {name: sum(value for value, _ in rows) for name, rows in self.pairs.items()}
        return found | {name: sums[name] / counts[name] for name in sums if counts[name]}


def _mean(rows: list[tuple[float, float]]) -> float:
    values, weights = zip(*rows, strict=True)
    is_even = len({*weights}) < 2 or not any(weights)
    return statistics.fmean(values, None if is_even else weights)


def _number(name: str, value: Any) -> float:
    is_one = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    if not is_one:
        raise JobError(f"the metric {name} is a {type(value).__name__}, no number", hint=_PAIR)
    return float(value)
