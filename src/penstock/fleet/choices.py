"""Choices: policies on machines, with what became of each over all futures, and the one to take."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.files import Json
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import Market
from penstock.fleet.one_future import Floats
from penstock.fleet.replay import Ruler

SURE = 0.95  # share of the futures in which a choice has to be in time, and in the budget


class Aim(NamedTuple):
    """What is asked for: hours, and dollars (inf: as many as it takes)."""

    deadline_h: float
    budget_usd: float = math.inf


@dataclass(frozen=True, slots=True, eq=False)
class Advised:
    """One choice over all futures.

    in_time, in_budget   share of the futures
    usd, hours           of each future
    """

    policy: str
    pools: tuple[str, ...]
    machines: int
    plan: str
    usd: Floats
    hours: Floats
    in_time: float
    in_budget: float
    useful: float
    ruler: Ruler
    market: Market
    job: FleetJob

    @property
    def sure(self) -> float:
        """Return the share of the futures in which it is in time, or in the budget: the smaller."""
        return min(self.in_time, self.in_budget)

    @property
    def mean_usd(self) -> float:
        """Return the mean of the dollars."""
        return float(self.usd.mean())

    @property
    def late_h(self) -> float:
        """Return the hours within which 9 of 10 futures are done."""
        return float(np.sort(self.hours)[math.ceil(0.9 * len(self.hours)) - 1])

    def to_json(self) -> dict[str, Json]:
        """Return the figures."""
        return {
            "policy": self.policy,
            "pools": list(self.pools),
            "machines": self.machines,
            "plan": self.plan,
            "mean_usd": self.mean_usd,
            "hours_9_in_10": self.late_h,
            "in_time": self.in_time,
            "in_budget": self.in_budget,
            "useful": self.useful,
        }


def front_of(tried: Sequence[Advised]) -> tuple[Advised, ...]:
    """Return the policies that none beats in mean dollars and hours of 9 in 10; cheapest first."""
    found: list[Advised] = []
    for one in sorted(tried, key=lambda one: (one.mean_usd, one.late_h)):
        if one.late_h < math.inf and all(one.late_h < other.late_h for other in found):
            found.append(one)
    return tuple(found)


def chosen_of(front: Sequence[Advised], tried: Sequence[Advised]) -> Advised:
    """Return the cheapest that is in time and in the budget 19 times in 20; else the surest."""
    good = [one for one in tried if min(one.in_time, one.in_budget) >= SURE]
    if good:
        return min(good, key=lambda one: (one.mean_usd, one.late_h))
    return max(tried, key=lambda one: (min(one.in_time, one.in_budget), -one.mean_usd))
