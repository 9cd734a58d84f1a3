"""Promise: between which dollars a choice will cost, in a future that nothing has seen.

The futures that a choice is tried on are made of one past, and two things are not in them.  A past
that lasts n stretches has n of them that tell something new; one that comes is beyond all of them
with a chance of about 1 / (n + 1): half of it stands on the least that the work can cost, half on
the most.  And markets drift: the quarters of the past differ in their means, and what comes is one
more such quarter, so that both ends are moved by what Student's t says of a fifth.

Ignores:  that a market may change by more than it ever did.
Source:   conformal prediction, arXiv:2107.07511; Student, 1908 (an interval for one more mean).
"""

import math
from typing import NamedTuple

import numpy as np

from penstock.fleet.job_work import FleetJob
from penstock.fleet.market import HOUR_S, Market
from penstock.fleet.one_future import Floats

SHARE = 0.8  # of what may come lies between the two ends
_QUARTERS, _T = 4, 1.638  # and Student's t of 80 % with three degrees of freedom


class Promise(NamedTuple):
    """The mean of the dollars, between which 8 in 10 lie, and the stretches that it is from."""

    mean_usd: float
    low_usd: float
    high_usd: float
    stretches: float


def promise_of(
    usd: Floats, in_order: Floats, market: Market, job: FleetJob, *, deadline_s: float
) -> Promise:
    """Return the promise that futures made of a market that was give of one to come.

    usd        of futures that may come
    in_order   dollars of stretches of the past, in the order of time
    """
    stretches = max(1.0, market.until_s / deadline_s)
    unseen = 1 / (stretches + 1)
    least, most = _ends(market, job)
    least, most = min(least, float(usd.min())), max(most, float(usd.max()))
    mean = float(usd.mean())
    tail = ((1 - SHARE) / 2 - unseen / 2) / (1 - unseen)
    if tail <= 0:
        return Promise(mean, least, most, stretches)
    low, high = np.quantile(usd, [tail, 1 - tail]).tolist()
    drift = _drift_usd(in_order)
    return Promise(mean, max(least, low - drift), min(most, high + drift), stretches)


def _drift_usd(in_order: Floats) -> float:
    """Return by how much the mean of one more quarter may differ from that of all quarters."""
    if len(in_order) < _QUARTERS:
        return 0.0
    means = [float(part.mean()) for part in np.array_split(in_order, _QUARTERS)]
    return _T * float(np.std(means, ddof=1)) * math.sqrt(1 + 1 / _QUARTERS)


def _ends(market: Market, job: FleetJob) -> tuple[float, float]:
    """Return the least that the work can cost, at the least price that was, and all on demand."""
    hours = job.seconds(job.size) / HOUR_S
    offered = market.machines >= 1
    spot = float(market.usd_h[offered].min()) if offered.any() else 0.0
    sure = min(pool.usd_h for pool in market.pools)
    pauses = 1.0
    if job.every_s is not None:
        pauses += job.checkpoint_s / job.every_s
    begins = (job.start_s + job.restart_s) / HOUR_S
    least = job.size * min(spot, sure) * hours
    return least, job.size * sure * (hours * pauses + begins)
