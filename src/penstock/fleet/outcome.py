"""Outcome: what policies do over many futures, beside the best that could have been done."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.files import Json
from penstock.fleet.futures import in_slots
from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market, begin_of
from penstock.fleet.omniscient import Slots, UsdBound, omniscient
from penstock.fleet.one_future import Floats
from penstock.fleet.replay import Replayed, Ruler, replay, replay_all

_MOST_SLOTS = 600  # of the dynamic program
_MOST_POOLS = 6  # whose fleets it holds beside one another


class Quantiles(NamedTuple):
    """The middle of what came out, and what 8 of 10 futures lie between."""

    low: float
    middle: float
    high: float


class PolicyRow(NamedTuple):
    """One policy over all futures.

    in_time      share of futures in which it was done by the deadline
    useful       share of the paid machine time that went into steps that counted
    cost_ratio   mean dollars over those of the omniscient, where both were in time
    gap_closed   share of the dollars between greedy and the omniscient that it saves; nan without
    missed       futures in which it was late although the omniscient was not
    """

    policy: str
    usd: Quantiles
    mean_usd: float
    hours: Quantiles
    in_time: float
    useful: float
    preemptions: float
    steps_lost: float
    cost_ratio: float
    gap_closed: float
    missed: int


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rows of policies, and what they are judged beside; `first` is each policy's first future."""

    rows: tuple[PolicyRow, ...]
    futures: int
    deadline_h: float
    best_usd: float
    best_in_time: int
    first: tuple[Replayed, ...]
    all_usd: tuple[Floats, ...]

    def to_json(self) -> Json:
        """Return rows and what they are judged beside."""
        rows: list[Json] = [
            {
                **row._asdict(),
                "usd": {**row.usd._asdict()},
                "hours": {**row.hours._asdict()},
            }
            for row in self.rows
        ]
        return {
            "policies": rows,
            "futures": self.futures,
            "deadline_hours": self.deadline_h,
            "omniscient_usd": self.best_usd,
            "omniscient_in_time": self.best_in_time,
        }


def judged(
    futures: Sequence[Market],
    job: FleetJob,
    rulers: Sequence[Ruler],
    *,
    deadline_s: float,
    tick_s: float = 300.0,
    told: Callable[[int, int], None] | None = None,
) -> Outcomes:
    """Return the outcome of each policy in each future, beside the omniscient.

    told   is called with the replays done and those to do
    """
    best = np.array([bound_of(future, job, deadline_s=deadline_s).usd for future in futures])
    total = len(futures) * len(rulers)
    all_of: list[tuple[Replayed, ...]] = []
    for ruler in rulers:
        past = len(all_of) * len(futures)
        all_of.append(
            replay_all(
                futures,
                job,
                lambda _, ruler=ruler: ruler,
                deadline_s=deadline_s,
                tick_s=tick_s,
                told=None if told is None else lambda done, _, past=past: told(past + done, total),
            )
        )
    named = [ruler.name for ruler in rulers]
    greedy = all_of[named.index("greedy")] if "greedy" in named else None
    rows = tuple(
        _row(name, runs, best, greedy, deadline_s) for name, runs in zip(named, all_of, strict=True)
    )
    first = tuple(
        replay(futures[0], job, ruler, deadline_s=deadline_s, tick_s=tick_s, with_timeline=True)
        for ruler in rulers
    )
    there = best[best < math.inf]
    usd = tuple(np.array([run.usd for run in runs]) for runs in all_of)
    mean = float(there.mean()) if len(there) else math.nan
    return Outcomes(rows, len(futures), deadline_s / HOUR_S, mean, len(there), first, usd)


def bound_of(market: Market, job: FleetJob, *, deadline_s: float) -> UsdBound:
    """Return the omniscient's dollars for a job that runs on all of its machines or none.

    With the preemptible machines of one pool at a time, and the rest on demand.
    In slots of `start_s`, which is what a change costs; longer where there would be more than 600.
    A future in slots offers the fewest machines of each, and loses as each begins what is gone in
    it; of a future that is not in slots already it is therefore no bound to the cent.
    Ignores:  what pauses and checkpoints cost, and plans for fewer machines.
    Raises:   FleetError: more than 6 pools.
    """
    if len(market.pools) > _MOST_POOLS:
        message = f"the omniscient policy of {len(market.pools)} pools"
        raise FleetError(message, hint=f"choose at most {_MOST_POOLS} pools")
    slot_s = max(job.start_s, 1.0, deadline_s / _MOST_SLOTS)
    count = math.floor(deadline_s / slot_s + 1e-9)
    coarse = in_slots(begin_of(market, max(1, count) * slot_s), slot_s)
    at = np.minimum(np.arange(count), len(coarse.times_s) - 1)
    usd_h = np.array([pool.usd_h for pool in market.pools])
    offered = coarse.machines
    before = np.concatenate([offered[:1], offered[:-1]])
    with np.errstate(invalid="ignore", divide="ignore"):
        taken = np.where(before > 0, np.minimum(1.0, coarse.gone / before), 0.0)
    taken = np.where(np.arange(count)[:, None] < len(offered), taken[at], 0.0)
    slots = Slots(slot_s, offered[at], coarse.usd_h[at], usd_h, taken)
    work = math.ceil(job.seconds(job.size) / slot_s - 1e-9)
    return omniscient(slots, machines=job.size, work=work)


def _row(
    name: str,
    runs: Sequence[Replayed],
    best: Floats,
    greedy: Sequence[Replayed] | None,
    deadline_s: float,
) -> PolicyRow:
    hours = np.array([run.hours for run in runs])
    usd = np.array([run.usd for run in runs])
    in_time = hours * HOUR_S <= deadline_s * (1 + 1e-9)
    can = best < math.inf
    both = can & in_time
    closed, least = math.nan, float(best[both].sum())
    if greedy is not None and both.any():
        naive = np.array([run.usd for run in greedy])
        gap = float((naive - best)[both].sum())
        closed = float((naive - usd)[both].sum()) / gap if gap > 1e-9 else math.nan
    return PolicyRow(
        policy=name,
        usd=_quantiles(usd),
        mean_usd=float(usd.mean()),
        hours=_quantiles(hours),
        in_time=float(in_time.mean()),
        useful=float(np.mean([run.useful for run in runs])),
        preemptions=float(np.mean([run.preemptions for run in runs])),
        steps_lost=float(np.mean([run.steps_lost for run in runs])),
        cost_ratio=float(usd[both].sum()) / least if least > 0 else math.nan,
        gap_closed=closed,
        missed=int(np.count_nonzero(can & ~in_time)),
    )


def _quantiles(values: Floats) -> Quantiles:
    ordered = np.sort(values)
    low, middle, high = (ordered[round(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9))
    return Quantiles(float(low), float(middle), float(high))
