"""Minima: least squares within bounds, and where a function of one number is least."""

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]

_STILL = 1e-13  # of the lengths of a column and of what is wanted: a slope that is rounding
_ROUNDS = 10  # for each unknown, at most: bounds are freed one by one, few of them twice
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def least_squares(rows: Floats, wanted: Floats, low: float, high: float) -> Floats:
    """Return x with `low <= x <= high` for which rows @ x is nearest to what is wanted.

    All begin at `low`.  That on a bound which gains most by leaving it becomes free; the free ones
    go to their own least squares, or part of the way there, up to the first bound on it.

    high:     may be infinity.
    Source:   C. L. Lawson, R. J. Hanson, "Solving least squares problems", 1974, chapter 23.
    """
    x, held = np.full(rows.shape[1], low), np.full(rows.shape[1], -1)  # -1: at low; 1: at high
    lengths = np.linalg.norm(rows, axis=0) * np.linalg.norm(wanted) + np.finfo(float).tiny
    for _ in range(_ROUNDS * len(x)):
        gains = -held * (rows.T @ (wanted - rows @ x)) / lengths
        most = int(np.argmax(gains))
        if gains[most] <= _STILL:
            break
        held[most] = 0
        before, x = x, _freed(x, held, (rows, wanted), (low, high))
        if np.array_equal(before, x):  # what it gains is rounding
            break
    return x


def _freed(
    x: Floats, held: NDArray[np.int64], given: tuple[Floats, Floats], bounds: tuple[float, float]
) -> Floats:
    """Return x with the least squares of those that are not held, and hold those at bounds."""
    (rows, wanted), (low, high) = given, bounds
    while (free := held == 0).any():
        goal = x.copy()
        rest = wanted - rows[:, ~free] @ x[~free]
        goal[free] = np.linalg.lstsq(rows[:, free], rest, rcond=None)[0]
        outside = (goal < low) | (goal > high)
        if not outside.any():
            return goal
        bound = np.where(goal < low, low, high)
        part = np.full(len(x), np.inf)
        part[outside] = (bound - x)[outside] / (goal - x)[outside]
        first = int(np.argmin(part))
        x = np.clip(x + part[first] * (goal - x), low, high)
        x[first], held[first] = bound[first], -1 if goal[first] < low else 1
    return x


def least_between(
    function: Callable[[float], float], low: float, high: float, within: float = 1e-5
) -> float:
    """Return where a function that first falls and then rises is least, by the golden section."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > within:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
    return (low + high) / 2.0
