"""Lifetimes: how long preemptible machines last, some not seen to end, and the laws that fit them.

Source: E. L. Kaplan and P. Meier, 1958; the bathtub of "Modeling The Temporally Constrained
Preemptions of Transient Cloud VMs", HPDC 2020.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from penstock.errors import FleetError
from penstock.extras import need
from penstock.fleet.csv_rows import read_cells
from penstock.fleet.market import DAY_S, HOUR_S, Floats, Market, MarketPool

_ENOUGH = 100
_LEAST_S = 1.0  # a life that is shorter counts as one of so many seconds


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """Lives in seconds, and whether each was seen to end; the others lasted at least so long."""

    seconds: Floats
    ended: Floats

    def __post_init__(self) -> None:
        if not len(self.seconds) or not self.ended.any():
            message = f"{len(self.seconds)} lifetimes, of which none was seen to end"
            raise FleetError(message, hint="give lifetimes of machines that were preempted")


@dataclass(frozen=True, slots=True)
class LifeLaw:
    """A law of lifetimes.

    numbers          its parameters, in seconds unless they are shares or exponents
    log_likelihood   of the lifetimes that it was fitted on
    survival         S(t), the share of machines that last longer than t seconds
    longest_s        by when the last one ends
    """

    name: str
    numbers: tuple[float, ...]
    log_likelihood: float
    survival: Callable[[Floats], Floats]
    longest_s: float

    @property
    def aic(self) -> float:
        """Return Akaike's criterion, of which the least is best."""
        return 2 * len(self.numbers) - 2 * self.log_likelihood

    def sample(self, random: np.random.Generator, count: int) -> Floats:
        """Return lives, by inverting the survival on a grid of a 4000th of the longest."""
        grid = np.linspace(0.0, self.longest_s, 4001)
        falls = 1.0 - np.minimum.accumulate(self.survival(grid))
        falls[-1] = 1.0
        drawn = random.random(count)
        at = np.clip(np.searchsorted(falls, drawn, side="left"), 1, len(grid) - 1)
        rise = np.maximum(falls[at] - falls[at - 1], 1e-300)
        part = np.clip((drawn - falls[at - 1]) / rise, 0.0, 1.0)
        return np.maximum(_LEAST_S, grid[at - 1] + part * (grid[at] - grid[at - 1]))


def read_lifetimes(path: Path | str) -> dict[str, Lifetimes]:
    """Return the lifetimes of each pool of a CSV file, one called after the file if it names none.

    Columns: lifetime_s; ended_by, preempted or anything else for a machine that its user stopped;
    pool.
    Raises:   FleetError: no such column, or a row that cannot be.
    """
    path = Path(path)
    header, rows = read_cells(path)
    if "lifetime_s" not in header:
        raise rows.fail(-1, f"no column lifetime_s among {', '.join(header)[:80]}")
    seconds = np.maximum(rows.numbers(header.index("lifetime_s"), "lifetime_s"), _LEAST_S)
    ended, pools = np.ones(len(rows)), np.full(len(rows), path.stem)
    if "ended_by" in header:
        ended = np.array(rows.columns[header.index("ended_by")]) == "preempted"
    if "pool" in header:
        pools = np.array(rows.columns[header.index("pool")])
    return {
        str(name): Lifetimes(seconds[pools == name], ended[pools == name].astype(np.float64))
        for name in np.unique(pools)
    }


def endless(path: Path) -> Market:
    """Return the market of a file of lifetimes: as many machines as are asked for, which die.

    Raises:   FleetError: as `read_lifetimes`.
    """
    found = read_lifetimes(path)
    shape = 1, len(found)
    return Market(
        tuple(MarketPool(name) for name in found),
        np.zeros(1),
        np.full(shape, np.inf),
        np.full(shape, np.nan),
        np.zeros(shape),
        DAY_S,
        laws=tuple(law_of(lives) for lives in found.values()),
    )


def law_of(lives: Lifetimes) -> LifeLaw:
    """Return the observed curve if a hundred machines were seen to end, else the likeliest law."""
    return empirical(lives) if lives.ended.sum() >= _ENOUGH else fits(lives)[0]


def kaplan_meier(lives: Lifetimes) -> tuple[Floats, Floats]:
    """Return times in seconds and the share of machines that last longer than each.

    S(t) = product over ends t_i <= t of 1 - d_i / n_i, n_i being alive just before.
    """
    times, at = np.unique(lives.seconds, return_inverse=True)
    ends = np.bincount(at, weights=lives.ended)
    leave = np.bincount(at)
    alive = len(lives.seconds) - np.concatenate([[0], np.cumsum(leave)[:-1]])
    return times, np.cumprod(1.0 - ends / alive, dtype=np.float64)


def fits(lives: Lifetimes) -> tuple[LifeLaw, ...]:
    """Return the laws that fit best of each kind, the likeliest by Akaike's criterion first.

    exponential, weibull and, where lives end near a longest one, bathtub; by greatest likelihood,
    with S(t) for those not seen to end.
    """
    found = [_exponential(lives), _weibull(lives)]
    if len(lives.seconds) >= 10:
        found.append(_bathtub(lives))
    return tuple(sorted(found, key=lambda law: law.aic))


def empirical(lives: Lifetimes) -> LifeLaw:
    """Return the observed curve, Kaplan and Meier's, which ends with the longest life."""
    times, survival = kaplan_meier(lives)

    def share(at_s: Floats) -> Floats:
        return np.concatenate([[1.0], survival])[np.searchsorted(times, at_s, side="right")]

    return LifeLaw("empirical", (), 0.0, share, float(times[-1]))


def _exponential(lives: Lifetimes) -> LifeLaw:
    mean = lives.seconds.sum() / lives.ended.sum()
    likely = float(-lives.ended.sum() * math.log(mean) - lives.seconds.sum() / mean)
    return LifeLaw("exponential", (mean,), likely, lambda t: np.exp(-t / mean), 20 * mean)


def _weibull(lives: Lifetimes) -> LifeLaw:
    """S(t) = exp(-(t / scale)^shape)."""

    def shortfall(log: Floats) -> float:
        shape, scale = np.exp(np.clip(log, -20, 40))
        rate = np.log(shape / scale) + (shape - 1) * np.log(lives.seconds / scale)
        return -float(lives.ended @ rate - ((lives.seconds / scale) ** shape).sum())

    mean = lives.seconds.sum() / lives.ended.sum()
    shape, scale = np.exp(_least(shortfall, np.log([0.8, mean])))
    longest = scale * 20.0 ** (1 / shape)
    numbers = float(shape), float(scale)
    likely = -shortfall(np.log([shape, scale]))
    return LifeLaw("weibull", numbers, likely, lambda t: np.exp(-((t / scale) ** shape)), longest)


def _bathtub(lives: Lifetimes) -> LifeLaw:
    """F(t) = A * (1 - exp(-t / t1) + exp((t - b) / t2)), b the longest life, when the rest ends.

    A <= 1/2, so that F <= 1.
    """
    t, last = lives.seconds, float(lives.seconds.max())

    def parts(log: Floats) -> tuple[float, float, float]:
        share = 0.5 / (1 + math.exp(-float(np.clip(log[0], -30, 30))))
        first, second = np.exp(np.clip(log[1:], -5, 30))
        return share, float(first), float(second)

    def falls(t: Floats, share: float, first: float, second: float) -> Floats:
        return share * (1 - np.exp(-t / first) + np.exp(np.minimum(0.0, t - last) / second))

    def shortfall(log: Floats) -> float:
        share, first, second = parts(log)
        rate = share * (np.exp(-t / first) / first + np.exp((t - last) / second) / second)
        left = np.maximum(1e-12, 1 - falls(t, share, first, second))
        seen = np.log(np.maximum(1e-300, rate))
        return -float(lives.ended @ seen + (1 - lives.ended) @ np.log(left))

    log = _least(shortfall, np.array([0.0, math.log(last / 20), math.log(last / 20)]))
    numbers = parts(log)

    def survival(t: Floats) -> Floats:
        return np.where(t >= last, 0.0, 1 - falls(t, *numbers))

    return LifeLaw("bathtub", numbers, -shortfall(log), survival, last)


def _least(function: Callable[[Floats], float], start: Floats) -> Floats:
    need("scipy", "solvers", "a law of lifetimes")
    from scipy.optimize import minimize  # pyright: ignore  - no types; loading it takes a while

    least = cast(Any, minimize)
    found = least(function, start, method="Nelder-Mead", options={"maxiter": 2000})
    return np.asarray(found.x, np.float64)


def by_hour(seconds: Floats, weights: Floats) -> Floats:
    """Return the relative likelihood of a loss in each hour of the day: [24], of mean 1.

    seconds   after midnight, of each loss
    weights   of each loss
    Drawn towards 1 by ten losses, so that an hour with few of them says little.
    """
    hours = (seconds % DAY_S // HOUR_S).astype(int)
    counts = np.bincount(hours, weights=weights, minlength=24)
    return (counts + 10 / 24) / (counts.sum() + 10) * 24
