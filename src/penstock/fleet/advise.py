"""Advise: which machines to take when: policies times pools times plans, replayed over futures.

What stays is the front: no other choice is cheaper on average and done sooner in 9 of 10 futures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.files import Json
from penstock.fleet.futures import resampled
from penstock.fleet.kernel import Floats, Policy
from penstock.fleet.market import HOUR_S, Market, only
from penstock.fleet.outcome import bound_of
from penstock.fleet.replay import Replayed, Ruler, replay, replay_all
from penstock.fleet.rulers import basis_of, ruler_of
from penstock.fleet.work import FleetJob

SURE = 0.95  # share of the futures in which a choice has to be in time, and in the budget
_MOST_POOLS = 4
_LONGER = 1.5  # times the deadline that futures last


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


@dataclass(frozen=True, slots=True)
class Advice:
    """The front by dollars, the choice that was made of it, and why; `first` is its first replay.

    best_usd   what the omniscient would have paid on the choice's machines; inf: never in time
    """

    choice: Advised
    front: tuple[Advised, ...]
    tried: tuple[Advised, ...]
    reasons: tuple[str, ...]
    best_usd: float
    first: Replayed


def advise(
    market: Market,
    job: FleetJob,
    aim: Aim,
    *,
    futures: int = 40,
    seed: int = 0,
    told: Callable[[int, int], None] | None = None,
) -> Advice:
    """Return the machines to take and when, with reasons.

    Tried are all built-in policies whose numbers follow from the job, on each pool alone and on all
    together, with each number of machines that there is a plan for.  Of more than four pools the
    four are taken that cost least for an hour with enough machines.
    Raises:   FleetError: a deadline or budget that is not above 0, or no future.
    """
    if not aim.deadline_h > 0 or not aim.budget_usd > 0:
        message = f"a deadline of {aim.deadline_h:g} h and a budget of {aim.budget_usd:g} dollars"
        raise FleetError(message, hint="give both above 0")
    ways = [*_ways(market, job)]
    tried: list[Advised] = []
    for at, (there, sized, names) in enumerate(ways):
        lasts_s = aim.deadline_h * HOUR_S
        basis = basis_of(there, lasts_s)
        those = [*resampled(there, futures, seed=seed, lasts_s=_LONGER * lasts_s)]
        for name in names:
            ruler = ruler_of(name, sized, basis, _no_function)
            tried.append(_tried(those, sized, ruler, aim))
        if told is not None:
            told(at + 1, len(ways))
    front = front_of(tried)
    choice = chosen_of(front, tried)
    those = [
        *resampled(choice.market, futures, seed=seed, lasts_s=_LONGER * aim.deadline_h * HOUR_S)
    ]
    first = replay(
        those[0], choice.job, choice.ruler, deadline_s=aim.deadline_h * HOUR_S, with_timeline=True
    )
    best = [bound_of(f, choice.job, deadline_s=aim.deadline_h * HOUR_S).usd for f in those]
    best_usd = float(np.mean(best))
    reasons = _reasons(choice, front, tried, aim, best_usd)
    return Advice(choice, front, tuple(tried), reasons, best_usd, first)


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


def _ways(market: Market, job: FleetJob) -> list[tuple[Market, FleetJob, list[str]]]:
    """Return pools, the job on a number of machines, and the policies to try."""
    found: list[tuple[Market, FleetJob, list[str]]] = []
    for size in job.sizes:
        sized = replace(job, machines=size)
        best = _cheapest(market, size)
        groups = [best, *([name] for name in best)] if len(best) > 1 else [best]
        for group in groups:
            names = ["greedy", "uniform_progress", "look_ahead", "transient", "auto_scaling,0.1"]
            if group is groups[0]:
                names.insert(0, "on_demand")
            if size > job.sizes[0]:
                names += ["liveput", f"anchored,{job.sizes[0]}"]
            found.append((only(market, group), sized, names))
    return found


def _cheapest(market: Market, machines: int) -> list[str]:
    """Return the pools whose hours with enough machines cost least, at most four."""
    share = market.share_up(machines)
    usd_h = (market.lasts_s() @ market.usd_h) / market.until_s
    order = np.argsort(usd_h / np.maximum(share, 1e-9), kind="stable")
    return [market.names[at] for at in order[:_MOST_POOLS]]


def _no_function(text: str) -> Policy:
    raise FleetError(f"{text} is no built-in policy", hint="advise tries those that are")


def _tried(futures: Sequence[Market], job: FleetJob, ruler: Ruler, aim: Aim) -> Advised:
    runs = replay_all(futures, job, lambda _: ruler, deadline_s=aim.deadline_h * HOUR_S)
    hours = np.array([run.hours for run in runs])
    usd = np.array([run.usd for run in runs])
    return Advised(
        ruler.name,
        futures[0].names,
        job.size,
        job.plan_of(job.size),
        usd,
        hours,
        float((hours <= aim.deadline_h * (1 + 1e-9)).mean()),
        float((usd <= aim.budget_usd).mean()),
        float(np.mean([run.useful for run in runs])),
        ruler,
        futures[0],
        job,
    )


def _reasons(
    choice: Advised,
    front: Sequence[Advised],
    tried: Sequence[Advised],
    aim: Aim,
    best_usd: float,
) -> tuple[str, ...]:
    """Return why, in sentences: what was asked for, what others would cost, what is the bound."""
    good = [one for one in tried if min(one.in_time, one.in_budget) >= SURE]
    asked = f"in time ({aim.deadline_h:g} h)"
    if aim.budget_usd < math.inf:
        asked += f" and in the budget ({aim.budget_usd:g} dollars)"
    if good:
        said = f"the cheapest of {len(good)} choices that are {asked} in 95 % of futures"
        found = [f"{said}; {len(tried) - len(good)} others are not"]
    else:
        part = 100 * min(choice.in_time, choice.in_budget)
        found = [
            f"no choice of {len(tried)} is {asked} in 95 % of futures; this is, in {part:.0f} %"
        ]
    sure = [one for one in tried if one.policy == "on_demand" and one.in_time >= SURE]
    if sure and choice.policy != "on_demand":
        least = min(sure, key=lambda one: one.mean_usd)
        more = least.mean_usd / choice.mean_usd
        found.append(
            f"on demand, {least.machines} machines cost {least.mean_usd:.2f} dollars, "
            f"{more:.2f} times as much, and take {least.late_h:.1f} h"
        )
    faster = [one for one in front if one.late_h < choice.late_h]
    if faster:
        next_ = min(faster, key=lambda one: one.mean_usd)
        found.append(
            f"{choice.late_h - next_.late_h:.1f} h sooner costs "
            f"{next_.mean_usd - choice.mean_usd:.2f} dollars more: {next_.policy} on "
            f"{next_.machines} machines"
        )
    if best_usd <= choice.mean_usd:  # of work that is shorter than a start it is no bound
        who = f"who knew the future would pay {best_usd:.2f} dollars for all or none of the"
        found.append(f"{who} {choice.machines} machines")
    return tuple(found)
