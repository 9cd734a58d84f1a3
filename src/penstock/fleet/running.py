"""Running: what a policy wants of a job that runs, from the market so far and how the job stands.

The functions are those that a replay asks (policies.py), and they see the same; but the clock is
the run's own, steps are those that were done, and machines those that are there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.fleet.job_work import FleetJob, with_figures
from penstock.fleet.market import DAY_S, Market, together
from penstock.fleet.one_future import (
    CLOCK,
    DEADLINE,
    DONE,
    EVERY,
    HELD,
    HELD_ON_DEMAND,
    NOW,
    OFFERED,
    PAUSE,
    POOL_VIEW,
    READY,
    READY_ON_DEMAND,
    RISK,
    SAVE,
    SINCE,
    START,
    TICK,
    USD,
    USD_ON_DEMAND,
    VIEW,
    WORK,
    Floats,
)
from penstock.fleet.replay import Replayed, Ruler, args_of, replay, rules_of

_DATED_S = 1000 * DAY_S  # times that are later are dates
_ROUNDED_S = 1e-9


class RunAim(NamedTuple):
    """Until when a run must be done, on its own clock, and how often it asks its policy."""

    deadline_s: float
    tick_s: float


class Standing(NamedTuple):
    """How a run stands; [pool, kind], kind 0 preemptible, 1 on demand.

    now_s    since it began
    done     steps
    held     machines that were ordered and are not lost
    ready    those of them that work, or are ready to
    """

    now_s: float
    done: float
    held: Floats
    ready: Floats


def so_far(markets: Sequence[Market], now_s: float, begun_s: float) -> Market:
    """Return the markets so far as one, whose `begins_s` is on the run's clock.

    begun_s   when the run began, in seconds since 1970; times that are no dates count from there.
    What a pool offers before its first row: nothing.
    Raises:   FleetError: a trace of lives, which does not tell what is offered now.
    """
    if any(market.laws for market in markets):
        raise FleetError("a trace of lives does not tell what is offered now", hint="give prices")
    dated = [market.begins_s > _DATED_S for market in markets]
    starts = [m.begins_s - begun_s * is_dated for m, is_dated in zip(markets, dated, strict=True)]
    base_s = min(*starts, now_s)
    past = [_until(m, at - base_s, now_s - base_s) for m, at in zip(markets, starts, strict=True)]
    midnight_s = (base_s + begun_s * any(dated)) % DAY_S
    return replace(together(past), begins_s=base_s, starts_s=midnight_s)


def _until(market: Market, begins_s: float, now_s: float) -> Market:
    """Return the rows of a market that begins so late up to a time, from 0 on."""
    times_s = market.times_s + begins_s
    rows = int(np.searchsorted(times_s, now_s + _ROUNDED_S, side="right"))
    tables = [market.machines[:rows], market.usd_h[:rows], market.gone[:rows]]
    times_s = times_s[:rows]
    if not rows or times_s[0] > 0:
        none = np.zeros((1, len(market.pools)))
        firsts = none, market.usd_h[:1], none
        tables = [np.vstack(pair) for pair in zip(firsts, tables, strict=True)]
        times_s = np.concatenate([[0.0], times_s])
    return replace(
        market,
        times_s=times_s,
        machines=tables[0],
        usd_h=tables[1],
        gone=tables[2],
        until_s=now_s + 1.0,
    )


def wants(ruler: Ruler, job: FleetJob, market: Market, stands: Standing, aim: RunAim) -> Floats:
    """Return the machines that a policy wants: [pool, kind], no more preemptible than offered.

    market    as `so_far` gives it, with prices
    """
    rules, wanted = rules_of(market, job, *aim), np.zeros_like(stands.held)
    at_s = stands.now_s - market.begins_s + _ROUNDED_S
    row = market.row_at(at_s)
    view, pools = np.zeros(VIEW), np.zeros((len(market.pools), POOL_VIEW))
    view[NOW], view[DONE], view[WORK] = stands.now_s, stands.done, rules.work
    view[DEADLINE], view[START], view[TICK] = rules.deadline_s, rules.start_s, rules.tick_s
    view[PAUSE], view[RISK] = max(rules.restart_s, rules.reform_s), rules.risk_s
    view[SAVE], view[EVERY] = rules.checkpoint_s, rules.every_s or math.inf
    view[READY], view[READY_ON_DEMAND] = stands.ready.sum(), stands.ready[:, 1].sum()
    view[CLOCK] = (market.starts_s + at_s) % DAY_S
    view[SINCE] = at_s - _since_s(market, row, rules.need)
    pools[:, OFFERED], pools[:, USD] = market.machines[row], market.usd_h[row]
    pools[:, HELD], pools[:, HELD_ON_DEMAND] = stands.held.T
    pools[:, USD_ON_DEMAND] = [pool.usd_h for pool in market.pools]
    ruler.policy(view, pools, job.table(), args_of(ruler, job), wanted)
    wanted = np.maximum(0.0, wanted)
    wanted[:, 0] = np.minimum(wanted[:, 0], market.machines[row])
    return np.floor(wanted)


def _since_s(market: Market, row: int, need: float) -> float:
    """Return since when some pool has enough machines, or none has."""
    up = market.machines[: row + 1].max(axis=1) >= need
    flips = np.flatnonzero(np.diff(up.astype(np.int8)))
    return float(market.times_s[flips[-1] + 1]) if len(flips) else 0.0


def to_come(ruler: Ruler, job: FleetJob, market: Market, stands: Standing, aim: RunAim) -> Replayed:
    """Return the outcome of the rest of a job if the market stays as it is now.

    Machines that are held need no start, unless some are not ready.
    """
    row = market.row_at(stands.now_s - market.begins_s + _ROUNDED_S)
    stays = replace(
        market,
        times_s=np.zeros(1),
        machines=market.machines[row : row + 1],
        usd_h=market.usd_h[row : row + 1],
        gone=np.zeros((1, len(market.pools))),
        until_s=1.0,
    )
    is_ready = stands.held.sum() > 0 and stands.ready.sum() >= stands.held.sum()
    left = max(job.steps - stands.done, 1e-9)
    rest = replace(job, steps=left, start_s=0.0 if is_ready else job.start_s)
    left_s = max(aim.deadline_s - stands.now_s, 1.0)
    return replay(stays, rest, ruler, deadline_s=left_s, tick_s=aim.tick_s)


def measured(job: FleetJob, steps: float, rates: Mapping[int, float]) -> FleetJob:
    """Return a job of `steps` steps with a run's measured speeds, by number of machines."""
    return replace(with_figures(job, rates), steps=steps, has_copies=True)
