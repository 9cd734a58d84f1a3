"""Words: figures as the page shows them."""

import math
from collections.abc import Iterable
from typing import NamedTuple

from penstock.units import format_bytes, format_seconds

MINUS = "\u2212"
ABSENT = "\u2013"
BEYOND = 1e15  # above it a figure is written with its power of ten

KIND_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "U": "update",
    "reduce": "reduce",
    "unshard": "unshard",
    "collect": "collect",
    "offload": "offload",
    "reload": "reload",
}


FLOP_UNITS = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"))


def flop_text(flop_per_s: float) -> str:
    """Return FLOP/s with their unit."""
    unit, name = next((row for row in FLOP_UNITS if flop_per_s >= row[0]), FLOP_UNITS[-1])
    return f"{flop_per_s / unit:.3g} {name}"


def kind_words(kind: str) -> str:
    """Return a kind of action with its name: "F forward"; "reduce" is its own."""
    words = KIND_WORDS.get(kind, kind)
    return words if words == kind else f"{kind} {words}"


class TimeUnit(NamedTuple):
    """A unit of time and how many decimals go with it."""

    seconds: float
    name: str
    decimals: int

    def of(self, seconds: float | None) -> str:
        """Return the figure without the unit, or a dash."""
        if seconds is None or not math.isfinite(seconds):
            return ABSENT
        value = seconds / self.seconds
        text = f"{value:.3g}" if abs(value) >= BEYOND else f"{value:,.{self.decimals}f}"
        return text.replace("-", MINUS)


UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def time_unit(seconds: Iterable[float | None], *, least: float = 10) -> TimeUnit:
    """Return one unit for all of `seconds`: at least `least` of it fit into the longest."""
    longest_s = max((abs(s) for s in seconds if s is not None and math.isfinite(s)), default=0.0)
    unit_s, name = next((unit for unit in UNITS if longest_s >= least * unit[0]), UNITS[-1])
    if longest_s == 0:
        unit_s, name = UNITS[0]
    return TimeUnit(unit_s, name, 2 if longest_s < 1000 * unit_s else 1)


def seconds_text(seconds: float | None) -> str:
    """Return a duration with its unit, or a dash."""
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    text = format_seconds(seconds) if abs(seconds) < BEYOND else f"{seconds:.3g} s"
    return text.replace("-", MINUS)


def bytes_text(size_bytes: float | None) -> str:
    """Return a size with its unit, or a dash."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return ABSENT
    text = format_bytes(size_bytes) if abs(size_bytes) < 1e18 else f"{size_bytes:.3g} B"
    return text.replace("-", MINUS)


def number_text(value: float | None) -> str:
    """Return a plain figure with four significant digits (all if it is whole), or a dash."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return "not a number"
    if value == int(value) and abs(value) < BEYOND:
        return f"{value:,.0f}".replace("-", MINUS)
    return (f"{value:,.0f}" if 1e4 <= abs(value) < BEYOND else f"{value:.4g}").replace("-", MINUS)


def error_of(predicted: float | None, measured: float | None) -> float | None:
    """Return predicted / measured - 1: below zero the prediction was too low; None if unknown."""
    if predicted is None or measured is None:
        return None
    if measured <= 0 or not math.isfinite(predicted) or not math.isfinite(measured):
        return 0.0 if predicted == measured else None
    return predicted / measured - 1


def percent_text(fraction: float | None) -> str:
    """Return a signed percentage with one decimal, or a dash."""
    if fraction is None or not math.isfinite(fraction):
        return ABSENT
    percent = 100 * fraction
    if abs(percent) < 0.05:
        return "0.0 %"
    text = f"{percent:+,.1f} %" if abs(percent) < BEYOND else f"{percent:+.3g} %"
    return text.replace("-", MINUS)


def share_text(fraction: float | None) -> str:
    """Return an unsigned percentage with one decimal, or a dash."""
    return percent_text(fraction).removeprefix("+")


def count_text(count: int, one: str, many: str = "") -> str:
    """Return a count with its noun: "1 rank", "4 ranks"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
