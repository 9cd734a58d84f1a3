"""Curve: after how many steps a loss will have come down to a target, by the steps so far.

    loss(t) = a + b * (t + 1)^-p        a, b at least 0

a, b and p make the squares of the differences least.  The newest half of the steps counts twice,
for it is nearest to what follows.

Ignores:  rates that change, and whatever else bends a curve later: a first guess, no promise.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.minima import least_between, least_squares

_POWERS: list[float] = np.geomspace(0.05, 4.0, 16).tolist()
_FEWEST = 8  # points


class LossPoint(NamedTuple):
    """The mean loss of so many micro-batches, after so many steps of the job's own batch."""

    steps: float
    loss: float
    micro_batches: int


def steps_to(points: Sequence[LossPoint], target: float) -> float | None:
    """Return after how many steps, from the first on, the loss is `target`.

    None where too few points are known, or the curve does not come down so far.
    """
    if len(points) < _FEWEST:
        return None
    at = np.array([one.steps for one in points])
    losses = np.array([one.loss for one in points])
    weights = np.sqrt(np.array([one.micro_batches for one in points], dtype=float))
    weights[len(points) // 2 :] *= 2**0.5

    def off(power: float) -> float:
        falls = (at + 1.0) ** -power
        floor, scale = _fitted(falls, losses, weights)
        return float(np.square((floor + scale * falls - losses) * weights).sum())

    rough = int(np.argmin([off(power) for power in _POWERS]))
    near = _POWERS[max(0, rough - 1)], _POWERS[min(len(_POWERS) - 1, rough + 1)]
    power = least_between(off, *near)
    floor, scale = _fitted((at + 1.0) ** -power, losses, weights)
    if scale <= 0 or target <= floor:
        return None
    return max(float(at[-1]), ((target - floor) / scale) ** (-1 / power) - 1.0)


def _fitted(
    falls: NDArray[np.float64], losses: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Return the floor and the scale, neither below 0, that fit best."""
    rows = np.stack([np.ones_like(falls), falls], axis=1) * weights[:, None]
    floor, scale = least_squares(rows, losses * weights, 0.0, math.inf).tolist()
    return floor, scale
