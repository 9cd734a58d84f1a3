"""Replay: a policy on one market or many futures: hours, dollars, and what became of the machines.

Deterministic: all chance is in the futures, which are made from a seed.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.fleet import one_future
from penstock.fleet.job_work import FleetJob
from penstock.fleet.loss_rate import every_s_of, is_warned
from penstock.fleet.market import DAY_S, HOUR_S, Market
from penstock.fleet.one_future import Floats, JobRules, Offers, Policy, play, player
from penstock.schedule.as_python import LOOPS

_MOST_ROWS = 20_000  # of a timeline
_MOST_DEADLINE_S = 3653 * DAY_S
_LONGEST = 5.0  # times the deadline, after which a replay ends


class Ruler(NamedTuple):
    """A policy with its arguments, after the number of machines."""

    name: str
    policy: Policy
    args: tuple[float, ...] = ()
    table: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a job in one future; hours and dollars, machine-hours, steps.

    hours        until the last step; inf: not done when the replay ended
    useful       share of the paid machine time that went into steps that counted
    timeline     [row, 7]: seconds, preemptible held, on demand held, ready, steps done, dollars
                 and the least price, where it was asked for
    """

    hours: float
    usd: float
    usd_preemptible: float
    machine_hours: float
    useful: float
    steps: float
    steps_lost: float
    preemptions: int
    changes: int
    checkpoints: int
    timeline: Floats

    @property
    def is_done(self) -> bool:
        """Return whether all steps were done."""
        return self.hours < math.inf


def replay(
    market: Market,
    job: FleetJob,
    ruler: Ruler,
    *,
    deadline_s: float,
    tick_s: float = 300.0,
    with_timeline: bool = False,
) -> Replayed:
    """Return the outcome of a job that follows a policy on one market.

    After the market's end its last row holds.

    tick_s    at least so often a policy is asked
    Raises:   FleetError: a market without prices; a deadline that cannot be.
    """
    check_deadline(deadline_s)
    offers = offers_of(market)
    rules, args = rules_of(market, job, deadline_s, tick_s), args_of(ruler, job)
    rows = np.zeros((_MOST_ROWS if with_timeline else 0, one_future.TIMELINE))
    run = player() if isinstance(ruler.policy, LOOPS) else play
    figures = run(ruler.policy, args, offers, rules, job.table(), rows)
    return _replayed(figures, rows, job)


def check_deadline(deadline_s: float) -> None:
    """Check that there is some time until a deadline, and no more than ten years.

    Raises:   FleetError: there is none, or more.
    """
    if not 0 < deadline_s <= _MOST_DEADLINE_S:
        hours = _MOST_DEADLINE_S / HOUR_S
        message = f"a deadline of {deadline_s / HOUR_S:g} h"
        raise FleetError(message, hint=f"give more than 0 hours, at most {hours:g}")


def replay_all(
    futures: Sequence[Market],
    job: FleetJob,
    ruler: Callable[[int], Ruler],
    *,
    deadline_s: float,
    tick_s: float = 300.0,
    told: Callable[[int, int], None] | None = None,
) -> tuple[Replayed, ...]:
    """Return the outcome of a job in each future; two threads share the futures.

    ruler   gives the policy of a future by its number: most give the same one
    told    is called with the number of futures done and that of all
    """

    def one(number: int) -> Replayed:
        market = futures[number]
        return replay(market, job, ruler(number), deadline_s=deadline_s, tick_s=tick_s)

    found: list[Replayed] = []
    with ThreadPoolExecutor(2) as threads:
        for done in threads.map(one, range(len(futures))):
            found.append(done)
            if told is not None:
                told(len(found), len(futures))
    return tuple(found)


def offers_of(market: Market) -> Offers:
    """Return a market as the kernel takes it.

    Raises:   FleetError: it has no prices, or lives that are not above 0.
    """
    usd_h = np.array([pool.usd_h for pool in market.pools], np.float64)
    if np.isnan(market.usd_h).any() or not np.all(usd_h > 0):
        hint = "give prices ON_DEMAND,SPOT in dollars per hour of a machine"
        raise FleetError("the market has no prices", hint=hint)
    lives = market.lives_s if market.lives_s.size else np.zeros((len(market.pools), 0))
    if lives.size and not lives.min() > 0:
        raise FleetError(f"a machine that lasts {lives.min()} s", hint="lives are above 0")
    notice_s = np.array([pool.notice_s for pool in market.pools], np.float64)
    return Offers(
        _plain(market.times_s),
        _plain(market.machines),
        _plain(market.usd_h),
        _plain(market.gone),
        _plain(lives),
        usd_h,
        notice_s,
        float(market.starts_s),
    )


def _plain(table: Floats) -> Floats:
    return np.ascontiguousarray(table, np.float64)


def args_of(ruler: Ruler, job: FleetJob) -> Floats:
    """Return the arguments of a policy besides its view: machines, its numbers, its table."""
    head = np.array([float(job.size), *ruler.args])
    return np.concatenate([head, ruler.table]) if len(ruler.table) else head


def rules_of(market: Market, job: FleetJob, deadline_s: float, tick_s: float) -> JobRules:
    """Return the costs of a job besides its steps, on a market."""
    every_s, risk_s = every_s_of(market, job, deadline_s), 0.0
    if not is_warned(market, job):  # the step under way, and all since a checkpoint
        risk_s = 1 / float(job.table()[-1])
        risk_s += every_s + job.checkpoint_s if every_s < math.inf else 0.0
    rules = (
        job.steps,
        deadline_s,
        _LONGEST * deadline_s,
        tick_s,
        job.start_s,
        job.reform_s,
        job.restart_s,
        job.checkpoint_s,
        every_s,
        risk_s,
        job.has_copies,
        job.size,
    )
    return JobRules(*map(float, rules))


def _replayed(figures: Floats, rows: Floats, job: FleetJob) -> Replayed:
    is_done = figures[one_future.STEPS] >= job.steps
    paid_s = float(figures[one_future.PAID_S])
    return Replayed(
        hours=float(figures[one_future.END]) / HOUR_S if is_done else math.inf,
        usd=float(figures[one_future.DOLLARS]),
        usd_preemptible=float(figures[one_future.SPOT_DOLLARS]),
        machine_hours=paid_s / HOUR_S,
        useful=float(figures[one_future.USEFUL_S]) / paid_s if paid_s else 0.0,
        steps=float(figures[one_future.STEPS]),
        steps_lost=float(figures[one_future.LOST]),
        preemptions=int(figures[one_future.PREEMPTIONS]),
        changes=int(figures[one_future.CHANGES]),
        checkpoints=int(figures[one_future.CHECKPOINTS]),
        timeline=rows[: int(figures[one_future.ROWS])],
    )
