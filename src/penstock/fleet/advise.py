"""Advise: which machines to take when: policies times pools times plans, replayed over futures.

What stays is the front: no other choice is cheaper on average and done sooner in 9 of 10 futures.
The futures begin as the market is now, at the end of the trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.errors import FleetError
from penstock.fleet.choice_reasons import TriedChoices, reasons_of
from penstock.fleet.choices import Advised, Aim, chosen_of, front_of
from penstock.fleet.futures import coming
from penstock.fleet.job_work import FleetJob
from penstock.fleet.loss_rate import saving
from penstock.fleet.market import HOUR_S, Market, only
from penstock.fleet.one_future import Policy
from penstock.fleet.outcome import bound_of
from penstock.fleet.promise import Promise, promise_of
from penstock.fleet.replay import Replayed, Ruler, check_deadline, replay, replay_all
from penstock.fleet.rulers import basis_of, ruler_of

_MOST_POOLS = 4
_LONGER = 1.5  # times the deadline that futures last


@dataclass(frozen=True, slots=True)
class Advice:
    """The front by dollars, the choice that was made of it, and why; `first` is its first replay.

    best_usd   what the omniscient would have paid on the choice's machines; inf: never in time
    promise    what the choice will cost, if what comes is like what was
    """

    choice: Advised
    front: tuple[Advised, ...]
    tried: tuple[Advised, ...]
    reasons: tuple[str, ...]
    best_usd: float
    first: Replayed
    promise: Promise


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
    lasts_s = aim.deadline_h * HOUR_S
    check_deadline(lasts_s)
    if not aim.budget_usd > 0:
        raise FleetError(f"a budget of {aim.budget_usd:g} dollars", hint="give more than 0")
    tried, groups = _all_tried(market, job, aim, futures, seed=seed, told=told)
    front = front_of(tried)
    choice = chosen_of(front, tried)
    past, those = groups[choice.pools, choice.machines]
    first = replay(those[0], choice.job, choice.ruler, deadline_s=lasts_s, with_timeline=True)
    best = [bound_of(f, choice.job, deadline_s=lasts_s).usd for f in those]
    best_usd = float(np.mean(best))
    runs = replay_all(
        basis_of(past, lasts_s).futures, choice.job, lambda _: choice.ruler, deadline_s=lasts_s
    )
    in_order = np.array([run.usd for run in runs])
    promise = promise_of(choice.usd, in_order, past, choice.job, deadline_s=lasts_s)
    reasons = reasons_of(TriedChoices(choice, front, tuple(tried), those), aim, best_usd, promise)
    return Advice(choice, front, tuple(tried), reasons, best_usd, first, promise)


def _all_tried(
    market: Market,
    job: FleetJob,
    aim: Aim,
    futures: int,
    *,
    seed: int,
    told: Callable[[int, int], None] | None,
) -> tuple[list[Advised], dict[tuple[tuple[str, ...], int], tuple[Market, list[Market]]]]:
    """Return all choices, and the past and the futures of each group of pools and machines."""
    tried: list[Advised] = []
    groups: dict[tuple[tuple[str, ...], int], tuple[Market, list[Market]]] = {}
    ways, lasts_s = _ways(market, job), aim.deadline_h * HOUR_S
    for at, (there, sized, names) in enumerate(ways):
        basis = basis_of(there, lasts_s)
        size, sized = sized.size, saving(sized, there, lasts_s)
        those = [*coming(there, futures, seed=seed, lasts_s=_LONGER * lasts_s, machines=size)]
        groups[there.names, size] = there, those
        for name in names:
            ruler = ruler_of(name, sized, basis, _no_function)
            tried.append(_tried(those, sized, ruler, aim))
        if told is not None:
            told(at + 1, len(ways))
    return tried, groups


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
