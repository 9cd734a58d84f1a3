"""Volatile ranks: what SGD loses where a step has y ranks and y is random, and which bids to make.

A step's gradient is the mean over the y ranks that are there; its variance is that of one rank
over y.  E[1/y] > 1/E[y]: that ranks come and go costs accuracy, not only time.

Source: "Machine Learning on Volatile Instances", arXiv:2003.05649.
"""

import bisect
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from penstock.errors import FleetError


def expected_inverse(ranks: int, survival: float) -> float:
    """Return E[1/y | y > 0], y the number of `ranks` that are there, each with chance `survival`.

    S(n) / (1 - (1 - q)^n), with S(n) = (1 - q) * S(n - 1) + (1 - (1 - q)^n) / n, S(0) = 0: a sum of
    positive terms, exact to rounding.

    Ignores:  that ranks of one pool leave together; `inverse_of` takes any distribution.
    Raises:   FleetError: no rank, or a chance outside (0, 1].
    """
    _check_ranks(ranks)
    _check_chance(survival, "a rank is there")
    gone, total, none = 1.0 - survival, 0.0, 1.0
    for count in range(1, ranks + 1):
        none *= gone
        total = gone * total + (-math.expm1(count * math.log1p(-survival)) if none else 1.0) / count
    some = -math.expm1(ranks * math.log1p(-survival)) if none else 1.0
    return total / some


def inverse_of(chances: Sequence[float]) -> float:
    """Return E[1/y | y > 0], `chances[y]` the chance that y ranks are there (of any scale).

    Raises:   FleetError: a negative chance, or none that there is a rank.
    """
    if len(chances) < 2 or min(chances) < 0 or not sum(chances[1:]) > 0:
        raise FleetError(
            f"the chances {list(chances)} are of no number of ranks",
            hint="give chances of 0, 1, 2, ... ranks, not all of them of 0",
        )
    return math.fsum(chance / y for y, chance in enumerate(chances) if y) / math.fsum(chances[1:])


def idle_factor(ranks: int, survival: float) -> float:
    """Return the mean tries of a step until a rank is there: 1 / (1 - (1 - survival)^ranks)."""
    _check_ranks(ranks)
    _check_chance(survival, "a rank is there")
    return 1.0 if survival == 1.0 else -1.0 / math.expm1(ranks * math.log1p(-survival))


# -- the error -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Descent:
    """A bound of the error of SGD on a c-strongly convex loss whose gradient is L-Lipschitz.

    error(J) = beta^J * start + noise * sum over j of beta^(J - j) * E[1/y_j].

    start:   E[G(w_0) - G*], in units of the loss.
    beta:    1 - rate * c * mu, the share of the error that a step keeps; in (0, 1).
    noise:   rate^2 * L * M / 2, what a step of one rank adds; M bounds the gradient's variance.
    Ignores:  losses that are not convex, momentum, and rates that change.
    """

    start: float
    beta: float
    noise: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not (self.start > 0 and 0 < self.beta < 1 and self.noise >= 0):
            raise FleetError(
                f"no descent has start {self.start}, beta {self.beta} and noise {self.noise}",
                hint="start must be above 0, beta between 0 and 1, noise not below 0",
            )

    def error(self, inverses: Iterable[float]) -> float:
        """Return the bound after a step for each of `inverses`, the E[1/y_j] of step j."""
        error = self.start
        for inverse in inverses:
            error = self.beta * error + self.noise * inverse
        return error

    def floor(self, inverse: float) -> float:
        """Return the error that no number of steps goes below: noise * E[1/y] / (1 - beta)."""
        return self.noise * inverse / (1.0 - self.beta)

    def steps(self, target: float, inverse: float) -> int:
        """Return the least J with error(J) <= target, E[1/y] being the same in each step.

        ceil(ln((target - floor) / (start - floor)) / ln beta).

        Raises:   FleetError: the target is not above the floor.
        """
        if target >= self.start:
            return 0
        floor = self.floor(inverse)
        if target <= floor:
            raise FleetError(
                f"an error of {target:g} is never reached: with E[1/y] = {inverse:.4g} it stays "
                f"above {floor:.4g}",
                hint="take more ranks, or a smaller learning rate",
            )
        return math.ceil(math.log((target - floor) / (self.start - floor)) / math.log(self.beta))


# -- more ranks, step by step ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Growth:
    """Ranks that grow by a factor each step: n_j = ceil(first * factor^(j - 1)), for `steps` steps.

    rank_steps:   the sum of n_j, what is paid for
    """

    first: int
    factor: float
    steps: int
    rank_steps: int


def grown(first: int, factor: float, steps: int) -> tuple[int, ...]:
    """Return n_j = ceil(first * factor^(j - 1)) for j = 1 .. steps.

    Raises:   FleetError: no rank, a factor below 1, or no step.
    """
    _check_ranks(first)
    if factor < 1 or steps < 1:
        raise FleetError(
            f"ranks cannot grow by a factor of {factor:g} in each of {steps} steps",
            hint="give a factor of 1 or more, and at least one step",
        )
    return tuple(math.ceil(first * factor**j - 1e-9) for j in range(steps))


def cheapest_growth(
    descent: Descent, target: float, *, survival: float, most_steps: int, most_ranks: int
) -> Growth | None:
    """Return the growth of fewest rank-steps whose error is at most `target`; None: there is none.

    Searched: every first number of ranks, factors of a grid from 1 up, and for each the least
    number of steps up to `most_steps`; no step has more than `most_ranks`.  Factor 1 is among
    them, so it costs no more than the best fixed number.
    """
    inverses = [expected_inverse(ranks, survival) for ranks in range(1, most_ranks + 1)]
    top = most_ranks ** (1.0 / max(1, most_steps - 1))
    best: Growth | None = None
    for first in range(1, most_ranks + 1):
        for part in np.linspace(0.0, 1.0, 33):
            found = _least_steps(
                descent, target, inverses, first=first, factor=float(top**part), most=most_steps
            )
            if found is not None and (best is None or found.rank_steps < best.rank_steps):
                best = found
    return best


def _least_steps(
    descent: Descent,
    target: float,
    inverses: Sequence[float],
    *,
    first: int,
    factor: float,
    most: int,
) -> Growth | None:
    error, paid = descent.start, 0
    for at, ranks in enumerate(grown(first, factor, most)):
        if ranks > len(inverses):
            return None
        error, paid = descent.beta * error + descent.noise * inverses[ranks - 1], paid + ranks
        if error <= target:
            return Growth(first, factor, at + 1, paid)
    return None


# -- bids ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prices:
    """What an hour of a rank costs, in dollars, rising; and the share of the time at each price."""

    usd_per_hour: tuple[float, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the prices."""
        usd, shares = self.usd_per_hour, self.shares
        is_rising = usd and usd[0] >= 0 and all(a < b for a, b in pairwise(usd))
        if not is_rising or len(usd) != len(shares) or min(shares) <= 0:
            raise FleetError(
                f"{len(usd)} prices from {usd[:1]} and {len(shares)} shares are no distribution",
                hint="give prices from 0 up, each once and in order, and a share above 0 of each",
            )
        if not abs(math.fsum(shares) - 1.0) < 1e-9:
            raise FleetError(
                f"the shares of the time add up to {math.fsum(shares):g}",
                hint="they must add up to 1",
            )

    @classmethod
    def of(cls, paid: Iterable[tuple[float, float]]) -> "Prices":
        """Return the distribution of (price, seconds at it), in any order.

        Raises:   FleetError: a negative price or duration, or no time at all.
        """
        spent: dict[float, float] = {}
        for price, seconds in paid:
            if not (price >= 0 and 0 <= seconds < math.inf):
                raise FleetError(
                    f"a price of {price:g} dollars for {seconds:g} s", hint="neither is below 0"
                )
            spent[price] = spent.get(price, 0.0) + seconds
        total = math.fsum(spent.values())
        rows = [(price, seconds / total) for price, seconds in sorted(spent.items()) if seconds > 0]
        return cls(tuple(price for price, _ in rows), tuple(share for _, share in rows))

    def share(self, bid: float) -> float:
        """Return F(bid), the share of the time in which the price is at most `bid`."""
        at = bisect.bisect_right(self.usd_per_hour, bid)
        return 1.0 if at == len(self.shares) else math.fsum(self.shares[:at])

    def paid(self, bid: float) -> float:
        """Return the integral of p dF up to `bid`: the mean price, counting 0 where it is above."""
        at = bisect.bisect_right(self.usd_per_hour, bid)
        return math.fsum(map(operator.mul, self.usd_per_hour[:at], self.shares[:at]))

    def least(self, share: float) -> float:
        """Return F^-1(share), the lowest bid that runs that share of the time; share <= 1."""
        rising = accumulate(self.shares)
        at = next((at for at, sum_ in enumerate(rising) if sum_ >= share - 1e-12), -1)
        return self.usd_per_hour[at]


@dataclass(frozen=True, slots=True)
class Bids:
    """`first` ranks at the higher bid, the others at the lower, and what they are expected to do.

    seconds, usd:   to the end of all steps, waits while the price is above both bids included
    inverse:        E[1/y] of a step
    """

    first: int
    ranks: int
    high_usd: float
    low_usd: float
    seconds: float
    usd: float
    inverse: float


def bids_of(
    prices: Prices, bids: tuple[float, float], *, first: int, ranks: int, busy_s: float
) -> Bids:
    """Return the work and cost of `first` ranks at bids[0] and the rest at bids[1] <= bids[0].

    seconds = busy_s / F(b1); usd = busy hours / F(b1) * (n1 * paid(b1) + (n - n1) * paid(b2));
    E[1/y] = (1 - g) / n1 + g / n, with g = F(b2) / F(b1).

    busy_s:   seconds of all steps, J * E[R]; the same for n1 ranks as for n.
    Raises:   FleetError: bids in another order, no such groups, or a bid below every price.
    """
    (high, low), rest = bids, ranks - first
    if not (low <= high and 1 <= first <= ranks):
        raise FleetError(
            f"{first} of {ranks} ranks at {high:g} and the rest at {low:g} are no two groups",
            hint="the first group has at least one rank and the higher bid",
        )
    runs = prices.share(high)
    if not runs:
        raise FleetError(
            f"a bid of {high:g} is below every price, the least is {prices.usd_per_hour[0]:g}",
            hint="bid more",
        )
    both = prices.share(low) / runs
    hourly = first * prices.paid(high) + rest * prices.paid(low)
    chances = [0.0] * (ranks + 1)
    chances[first] += 1.0 - both
    chances[ranks] += both
    usd = busy_s / 3600.0 / runs * hourly
    return Bids(first, ranks, high, low, busy_s / runs, usd, inverse_of(chances))


def single_bid(prices: Prices, ranks: int, *, busy_s: float, deadline_s: float) -> Bids | None:
    """Return the cheapest bid that is expected to meet the deadline: F^-1(busy_s / deadline_s).

    None where no bid does: the steps take longer than there is time.
    """
    if busy_s > deadline_s:
        return None
    bid = prices.least(busy_s / deadline_s)
    return bids_of(prices, (bid, bid), first=ranks, ranks=ranks, busy_s=busy_s)


def two_bids(
    prices: Prices, ranks: int, inverse: float, *, busy_s: float, deadline_s: float
) -> Bids | None:
    """Return the cheapest two groups that meet the deadline with an E[1/y] of at most `inverse`.

    For n1 ranks in the first group: b1 = F^-1(busy_s / deadline_s), and b2 = F^-1(g * F(b1)), with
    g = (1/n1 - inverse) / (1/n1 - 1/n), as low as the error allows.  n1 is found by trying; so is
    b1, because where prices come in jumps g is more than it has to be.  One group is among them.

    None where no bids do.
    """
    if busy_s > deadline_s or inverse * ranks < 1 - 1e-12:
        return None
    least = prices.least(busy_s / deadline_s)
    found: list[Bids] = []
    for first in range(1, ranks + 1):
        both = 0.0 if first == ranks else (1 / first - inverse) / (1 / first - 1 / ranks)
        for high in prices.usd_per_hour[prices.usd_per_hour.index(least) :]:
            low = high if first == ranks else prices.least(both * prices.share(high))
            if both <= 0 < ranks - first:
                low = 0.0  # the second group may stay away
            pair = high, min(high, low)
            found.append(bids_of(prices, pair, first=first, ranks=ranks, busy_s=busy_s))
    return min(found, key=lambda one: (one.usd, one.seconds))


def _check_ranks(ranks: int) -> None:
    if ranks < 1:
        raise FleetError(f"{ranks} ranks train nothing", hint="give at least one rank")


def _check_chance(chance: float, of: str) -> None:
    if not 0.0 < chance <= 1.0:
        raise FleetError(
            f"the chance that {of} is {chance:g}", hint="give a number above 0, at most 1"
        )
