"""Markets that tests make: slots of equal length in which each pool has enough machines or none."""

import numpy as np

from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.market import Market, MarketPool

SLOT_S = 360.0
USD, SPOT = 3.0, 1.0


def slotted(up, *, machines=4, usd=USD, spot=SPOT, slot_s=SLOT_S, notice_s=60.0):
    """Return a market of pools that offer `machines` where up[slot][pool], else none."""
    offered = np.array(up, np.float64).reshape(len(up), -1) * machines
    pools = tuple(MarketPool(f"zone{k}", usd, notice_s) for k in range(offered.shape[1]))
    prices = np.broadcast_to(np.asarray(spot, np.float64), offered.shape).copy()
    times_s = np.arange(len(up)) * slot_s
    gone = np.zeros_like(offered)
    return Market(pools, times_s, offered, prices, gone, len(up) * slot_s)


def plain_job(slots, *, machines=4, **more):
    """Return a job of so many slots of work on `machines`, whose only cost of change is a start."""
    given = {"start_s": SLOT_S, "reform_s": 0.0, "restart_s": 0.0, "checkpoint_s": 0.0, **more}
    return FleetJob(slots * SLOT_S, (Speed(machines, 1.0),), **given)
