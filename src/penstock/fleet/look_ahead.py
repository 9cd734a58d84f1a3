"""Look ahead: wait for cheap hours while there is time to spare, and never miss a deadline.

What has to be paid for is the work; when it is done is free to choose, within the deadline.  An
hour on demand costs the same whenever it is taken, so it is put off as long as it can be, and
meanwhile it turns out whether it is needed at all.  What an hour costs now is that of the **mixed**
fleet: as many preemptible machines of a pool as it offers, the rest on demand.

    time to spare = deadline - now - start - restart - what a loss may cost - the rest of the work

    none                           all on demand, to the end
    less than the reserve          work: on the mixed fleet where it is cheaper, else on demand
    more                           work where the mixed fleet's hour is one of the cheap ones

Each loss costs time - a start, a restart, steps done again - and whoever has none left must stay on
demand while others take cheap machines; so a share of the time that is left is held in reserve.
Cheap hours are those of which, by the past, there are as many as the rest of the work needs: the
bid F^-1(work / time) of a single bidder; a little more of them where machines are held, which would
have to start again.  From machines on demand the job goes back to preemptible
ones once they have been there for a while: short spells do not pay for their starts.

Machines are also lost one by one while enough stay, and each leaves the job waiting for a start; so
a mixed fleet has some spare ones.  What is held stays until what takes over from it is useful.  The
spare machines, the reserve and the while are those that cost least when replayed over the past.

Source:   "Can't Be Late", NSDI 2024 (time to spare as the budget of a policy); "Machine Learning on
          Volatile Instances", arXiv:2003.05649 (the bid).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market
from penstock.fleet.one_future import (
    DEADLINE,
    HELD,
    HELD_ON_DEMAND,
    NOW,
    OFFERED,
    READY,
    READY_ON_DEMAND,
    SINCE,
    USD,
    USD_ON_DEMAND,
    Floats,
    ruled_by,
)
from penstock.fleet.policies import cheapest, is_late, slack_s
from penstock.fleet.replay import Ruler, replay_all
from penstock.schedule.compiled import kept

_NEVER = 1e12  # dollars, beside which all others are small
_TRIED = 60  # futures that numbers are tried on
_STAYS = 0.15  # of the past by which more prices are cheap while machines are held
_LEVELS = 33  # of the prices of the past
_RESERVES = 0.02, 0.0, 0.01, 0.04, 0.08, 0.16  # of the time left
_WHILES = 1.0, 0.0, 4.0, 12.0  # starts


class _Thrift(NamedTuple):
    """The numbers of the policy.

    spare     preemptible machines besides those that are asked for
    reserve   share of the time left that is to spare
    while_s   for which preemptible machines are there before those on demand are given up
    """

    spare: int
    reserve: float
    while_s: float


def look_ahead(futures: Sequence[Market], job: FleetJob, *, deadline_s: float) -> Ruler:
    """Return the policy with the numbers that cost least over futures like these.

    Ignores:  what the time of day tells; plans for fewer machines.
    """
    tried = futures[:_TRIED]
    numbers = _Thrift(0, _RESERVES[0], _WHILES[0] * job.start_s)
    best, least = _ruler(tried, job, numbers), math.inf
    fields = (
        ("spare", _spares(job.size)),
        ("reserve", _RESERVES),
        ("while_s", [times * job.start_s for times in _WHILES]),
    )
    for name, values in fields:
        for value in values:
            other = numbers._replace(**{name: value})
            ruler = _ruler(tried, job, other)
            usd = _mean_usd(tried, job, ruler, deadline_s)
            if usd < least * (1 - 1e-3):
                best, least, numbers = ruler, usd, other
    return best


def _spares(machines: int) -> list[int]:
    """Return numbers of spare machines to try: 0, 1, 2, 3, 4, 6, 8, 12, ... up to `machines`."""
    found = {0, *(factor << k for k in range(machines.bit_length()) for factor in (1, 3))}
    return sorted(spare for spare in found if spare <= machines)


def _ruler(futures: Sequence[Market], job: FleetJob, numbers: _Thrift) -> Ruler:
    """Return the policy with these numbers, and the prices of an hour in these futures."""
    prices = np.concatenate([_usd_h(future, job.size, numbers.spare) for future in futures])
    lasts_s = np.concatenate([future.lasts_s() for future in futures])
    order = np.argsort(prices)
    share = np.cumsum(lasts_s[order]) / lasts_s.sum()
    levels = np.searchsorted(share, np.linspace(0, 1, _LEVELS) - 1e-9)
    table = prices[order][np.minimum(levels, len(order) - 1)]
    return Ruler("look_ahead", expecting, (), np.array([*numbers, *table], np.float64))


def _usd_h(market: Market, machines: int, spare: int) -> Floats:
    """Return dollars per hour of a mixed fleet that is ordered anew, in each row."""
    sure_usd_h = np.array([pool.usd_h for pool in market.pools])
    tables = np.ascontiguousarray(market.machines), np.ascontiguousarray(market.usd_h)
    return _row_usd_h(*tables, float(sure_usd_h.min()), float(machines), float(spare))


def _mean_usd(futures: Sequence[Market], job: FleetJob, ruler: Ruler, deadline_s: float) -> float:
    """Return the mean dollars of a policy; what is late is dear."""
    runs = replay_all(futures, job, lambda _: ruler, deadline_s=deadline_s)
    late = sum(run.hours * HOUR_S > deadline_s * (1 + 1e-9) for run in runs)
    return sum(run.usd for run in runs) / len(runs) + _NEVER * late


# -- a mixed fleet ---------------------------------------------------------------------------------


@kept
def _pool_for(offered: Floats, usd_h: Floats, own: int, size: float) -> int:
    """Return the pool of which machines are held: the own one, if it has enough or none has.

    Else the cheapest with enough; where none has, the one that offers most.  -1: none offers any.
    """
    if own >= 0 and offered[own] >= size:
        return own
    best, has_enough = own if own >= 0 and offered[own] >= 1 else -1, False
    for pool in range(len(offered)):
        is_most = best < 0 or offered[pool] > offered[best]
        if offered[pool] >= size:
            if not has_enough or usd_h[pool] < usd_h[best]:
                best, has_enough = pool, True
        elif not has_enough and own < 0 and offered[pool] >= 1 and is_most:
            best = pool
    return best


@kept
def _spot_of(offered: float, size: float, spare: float) -> float:
    return math.floor(min(offered, size + spare))


@kept
def _fill_of(spot: float, size: float, spare: float) -> float:
    """Return the number of machines on demand beside `spot` preemptible ones.

    Spare ones are there in proportion to those that may be lost.
    """
    return max(0.0, size + math.ceil(spare * spot / (size + spare)) - spot)


@kept
def _row_usd_h(
    machines: Floats, usd_h: Floats, sure_usd_h: float, size: float, spare: float
) -> Floats:
    found = np.zeros(len(machines))
    for row in range(len(machines)):
        pool, spot = _pool_for(machines[row], usd_h[row], -1, size), 0.0
        if pool >= 0:
            spot = _spot_of(machines[row, pool], size, spare)
            found[row] = spot * usd_h[row, pool]
        found[row] += _fill_of(spot, size, spare) * sure_usd_h
    return found


# -- the policy ------------------------------------------------------------------------------------


@kept
def _bid(args: Floats, share: float) -> float:
    """Return the price below which that share of the past was."""
    levels = len(args) - 4
    return args[4 + min(levels - 1, math.ceil(share * (levels - 1) - 1e-9))]


@ruled_by
def expecting(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want what `look_ahead` says; args: machines, spare, reserve, while_s, prices by share."""
    machines, spare = args[0], args[1]
    own, spot, sure_usd_h = -1, 0.0, pools[:, USD_ON_DEMAND].min()
    for k in range(pools.shape[0]):
        if pools[k, HELD] > 0 and (own < 0 or pools[k, HELD] > pools[own, HELD]):
            own = k
    pool = _pool_for(pools[:, OFFERED], pools[:, USD], own, machines)
    if pool >= 0:
        spot = _spot_of(pools[pool, OFFERED], machines, spare)
    fill = _fill_of(spot, machines, spare)
    usd_h = fill * sure_usd_h + (spot * pools[pool, USD] if pool >= 0 else 0.0)
    ready, sure = view[READY] - view[READY_ON_DEMAND], pools[:, HELD_ON_DEMAND].sum()
    is_sure = sure >= machines and ready < max(1.0, spot)
    time_s = max(view[DEADLINE] - view[NOW], 1e-9)
    slack = slack_s(view, speed, machines)
    share = min(1.0, max(0.0, 1 - slack / time_s))
    holds = 2 * (pools[:, HELD].sum() + sure) > machines
    if holds:
        share = min(1.0, share + _STAYS)
    is_cheaper = usd_h < machines * sure_usd_h and (not is_sure or view[SINCE] >= args[3])
    wanted[:] = 0.0
    if not is_late(view, speed, machines):
        is_short = slack < args[2] * time_s or is_sure
        if is_cheaper and (is_short or usd_h <= _bid(args, share) * (1 + 1e-9)):
            if pool >= 0:
                wanted[pool, 0] = spot
            stays = min(sure, _fill_of(min(ready, spot), machines, spare))
            wanted[cheapest(pools, USD_ON_DEMAND), 1] = max(fill, stays)
            return
        if not is_short:
            return
    wanted[cheapest(pools, USD_ON_DEMAND), 1] = machines
    if view[READY_ON_DEMAND] < machines:  # until those on demand are useful
        wanted[:, 0] = pools[:, HELD]
