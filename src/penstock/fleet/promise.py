"""Promise: between which dollars a choice will cost, in a future that nothing has seen.

The futures that a choice is tried on are stretches of one past.  A past that lasts n stretches has
n of them that tell something new; a stretch that is to come costs less than all n, or more, with a
chance of 1 / (n + 1) at each end, as any of n + 1 may be the last.  Half of 1 / (n + 1) stands on
the least that the work can cost, half on the most.

Ignores:  that a market may change for good; then no past promises anything.
Source:   conformal prediction, arXiv:2107.07511.
"""

from typing import NamedTuple

import numpy as np

from penstock.fleet.kernel import Floats
from penstock.fleet.market import HOUR_S, Market
from penstock.fleet.work import FleetJob

SHARE = 0.8  # of what may come lies between the two ends


class Promise(NamedTuple):
    """The mean of the dollars, between which 8 in 10 lie, and the stretches that it is from."""

    mean_usd: float
    low_usd: float
    high_usd: float
    stretches: float


def promise_of(usd: Floats, market: Market, job: FleetJob, deadline_s: float) -> Promise:
    """Return the promise that futures made of a market that was give of one to come."""
    stretches = max(1.0, market.until_s / deadline_s)
    unseen = 1 / (stretches + 1)
    least, most = _ends(market, job)
    least, most = min(least, float(usd.min())), max(most, float(usd.max()))
    mean = (1 - unseen) * float(usd.mean()) + unseen * (least + most) / 2
    tail = ((1 - SHARE) / 2 - unseen / 2) / (1 - unseen)
    if tail <= 0:
        return Promise(mean, least, most, stretches)
    low, high = np.quantile(usd, [tail, 1 - tail]).tolist()
    return Promise(mean, low, high, stretches)


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
