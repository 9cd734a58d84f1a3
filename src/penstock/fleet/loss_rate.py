"""Losses: how often a market takes machines of a job, or all of them, and how often to save.

Of a pool that loses g of its b machines, a job that holds h of them loses h * g / b, and at least
so many that it holds no more than are left: what the kernel takes.
"""

import math
from dataclasses import replace

import numpy as np

from penstock.errors import FleetError
from penstock.fleet.futures import lives_of
from penstock.fleet.job_work import FleetJob, young_daly_s
from penstock.fleet.market import Floats, Market

_MOST_SAVES = 100_000  # checkpoints until the deadline


def _held_and_lost(market: Market, machines: int) -> tuple[Floats, Floats]:
    """Return the machines, of so many, held before each row and lost at it: [row, pool]."""
    before = np.vstack([market.machines[:1], market.machines[:-1]])
    held = np.minimum(np.floor(before), machines)
    finite = np.where((before > 0) & np.isfinite(before), before, 1.0)
    shares = np.where(np.isfinite(before), np.minimum(1.0, market.gone / finite), 0.0)
    lost = np.maximum(held * shares, held - np.floor(market.machines))
    return held, np.where(held > 0, lost, 0.0)


def mean_life_s(market: Market, machines: int) -> float:
    """Return the mean seconds between losses, of one or more of so many machines; inf: none.

    Of the pool that loses most often.  Machines that are lost at once are one loss.
    """
    _, lost = _held_and_lost(market, machines)
    rate = float(np.minimum(1.0, lost).sum(axis=0).max()) / market.until_s
    if market.lives_s.size:
        rate += machines / float(market.lives_s.mean(axis=1).min())
    return 1 / rate if rate > 0 else math.inf


def mean_whole_life_s(market: Market, machines: int, start_s: float) -> float:
    """Return the mean seconds between losses of all of so many machines of a pool at once.

    Machines that die one by one are all lost where each of the others dies within `start_s`, before
    a new one is useful.  inf: they never are.
    """
    held, lost = _held_and_lost(market, machines)
    chances = np.where(held > 0, np.clip(lost - (held - 1), 0.0, 1.0), 0.0)
    rate = float(chances.sum(axis=0).max()) / market.until_s
    if market.lives_s.size:
        life_s = float(market.lives_s.mean(axis=1).min())
        others = [min(1.0, count * start_s / life_s) for count in range(1, machines)]
        rate += machines / life_s * math.prod(others)
    return 1 / rate if rate > 0 else math.inf


def is_warned(market: Market, job: FleetJob) -> bool:
    """Return whether each pool warns so early that a checkpoint can be written."""
    return all(pool.notice_s > 0 and pool.notice_s >= job.checkpoint_s for pool in market.pools)


def every_s_of(market: Market, job: FleetJob, deadline_s: float, *, past: bool = False) -> float:
    """Return the seconds of work between two checkpoints; 0.0: they are free; inf: none is written.

    By Young and Daly, from how often something is lost that only a checkpoint has: anything of a
    job without copies, all machines at once of one with copies.  No more than 100,000 until the
    deadline.

    past      the market is one that was, and another one comes: one loss more is expected
    Raises:   FleetError: a job that asks for more checkpoints than that.
    """
    least_s = deadline_s / _MOST_SAVES
    if job.every_s is not None:
        if job.every_s < least_s:
            message = f"every_s is {job.every_s:g}, {deadline_s / job.every_s:.3g} checkpoints"
            raise FleetError(message, hint=f"give at least {least_s:.2g} s, or leave it out")
        return job.every_s
    if is_warned(market, job):
        return math.inf
    if job.checkpoint_s == 0:
        return 0.0
    if job.has_copies:
        life_s = mean_whole_life_s(market, job.size, job.start_s)
    else:
        life_s = mean_life_s(market, job.size)
    if past:
        life_s = 1 / (1 / life_s + 1 / market.until_s)
    return max(young_daly_s(job.checkpoint_s, life_s), job.checkpoint_s, least_s)


def saving(job: FleetJob, history: Market, deadline_s: float) -> FleetJob:
    """Return a job that knows the seconds between its checkpoints, from the market that was."""
    if history.laws and not history.lives_s.size:
        history = replace(history, lives_s=lives_of(history, np.random.default_rng(0)))
    every_s = every_s_of(history, job, deadline_s, past=True)
    return replace(job, every_s=every_s) if 0 < every_s < math.inf else job
