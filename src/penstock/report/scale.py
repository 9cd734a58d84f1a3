"""Scales: from values to pixels, and where the marks of an axis stand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.report.figure_words import bytes_text, number_text, seconds_text, time_unit

Floats = NDArray[np.float64]


class Format(NamedTuple):
    """How the values of an axis are written; `name` tells the script to do the same."""

    name: str
    text: Callable[[float], str]
    binary: bool = False  # marks at powers of two


PLAIN = Format("number", number_text)
SECONDS = Format("seconds", seconds_text)
BYTES = Format("bytes", bytes_text, binary=True)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from [low, high] to the pixels [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, values: Floats) -> Floats:
        """Return the pixels of `values`; all at `start` where the range is empty."""
        length = self.high - self.low
        if length <= 0:
            return np.full(len(values), self.start)
        return self.start + (values - self.low) / length * (self.end - self.start)

    def of(self, value: float) -> float:
        """Return the pixel of one value."""
        return float(self(np.array([value]))[0])


def ticks(low: float, high: float, *, about: int = 5, binary: bool = False) -> tuple[float, ...]:
    """Return round values between `low` and `high`: multiples of 1, 2 or 5 times a power of ten.

    At least `about` / 2.5 of them and at most `about` + 1; multiples of a power of two if `binary`.
    Only the two ends where the range is empty or too narrow for floats.
    """
    step = tick_step(high - low, about, binary=binary)
    if step == 0 or abs(low) > 1e12 * step or abs(high) > 1e12 * step:
        return (low,) if low == high else (low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return tuple(k * step for k in range(first, last + 1))


def tick_step(length: float, about: int, *, binary: bool = False) -> float:
    """Return the smallest round distance with at most `about` of it in `length`; 0.0 for none."""
    least = length / about
    if not 1e-290 < least < 1e290:
        return 0.0
    if binary:
        return 2.0 ** math.ceil(math.log2(least) - 1e-9)
    power = 10.0 ** math.floor(math.log10(least) + 1e-9)
    return next(k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9))


def time_labels(times_s: Sequence[float]) -> tuple[str, ...]:
    """Return the texts of marks on a time axis: one unit, decimals enough to tell them apart."""
    unit = time_unit(times_s, least=2)
    longest = max((abs(time_s) for time_s in times_s), default=0.0) / unit.seconds
    if not longest < 1e9:
        return tuple(map(seconds_text, times_s))
    step = min((b - a for a, b in pairwise(times_s)), default=0.0)
    step /= unit.seconds
    decimals = 0 if step <= 0 else min(9, max(0, -math.floor(math.log10(step) + 1e-9)))
    return tuple(f"{time_s / unit.seconds:.{decimals}f} {unit.name}" for time_s in times_s)
