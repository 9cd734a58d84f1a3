"""Omniscient: the cheapest that anyone could have done who knew the market to come.

An exact dynamic program over slots: which of a menu of fleets to hold in each, of least dollars,
so that the work is done by the deadline.  A machine is useful from the second slot on in which it
is held; so what a slot adds is the speed of those that are held in it and in the one before.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.kernel import Floats
from penstock.schedule.compiled import compiled

Longs = NDArray[np.int64]
_NEVER = np.inf


class Slots(NamedTuple):
    """A future in slots of equal length: [slot, pool]."""

    slot_s: float
    machines: Floats
    usd_h: Floats
    usd_on_demand_h: Floats  # [pool]


class UsdBound(NamedTuple):
    """What the best costs, and what it holds: wanted [slot, pool, 2]; inf if nothing is in time."""

    usd: float
    wanted: Floats


def fleets_of(pools: int, machines: int) -> Floats:
    """Return the fleets of a job that runs on `machines` of one pool: [fleet, pool, 2].

    None; all of a pool; all on demand in a pool; and all of a pool beside all on demand or all of
    another pool, while one takes over from the other.
    """
    sides = [(pool, kind) for pool in range(pools) for kind in range(2)]
    menus: list[Sequence[tuple[int, int]]] = [(), *([side] for side in sides)]
    menus += [(a, b) for k, a in enumerate(sides) for b in sides[k + 1 :] if not a[1] & b[1]]
    found = np.zeros((len(menus), pools, 2))
    for at, menu in enumerate(menus):
        for pool, kind in menu:
            found[at, pool, kind] = machines
    return found


def omniscient(slots: Slots, fleets: Floats, gains: Longs, *, work: int) -> UsdBound:
    """Return the least dollars to add up `work` within the slots.

    fleets   [fleet, pool, 2]: the first must be empty
    gains    [fleet before, fleet]: what a slot adds, in units of which `work` are needed
    """
    flat = fleets.reshape(len(fleets), -1)
    spot = flat[:, 0::2]
    allowed = (spot[None] <= slots.machines[:, None, :]).all(axis=2)
    hourly = slots.usd_h @ spot.T + (slots.usd_on_demand_h @ flat[:, 1::2].T)[None]
    cost = np.where(allowed, np.nan_to_num(hourly) * slots.slot_s / 3600, _NEVER)
    usd, chosen = _solve(np.ascontiguousarray(cost), gains, work)
    return UsdBound(float(usd), fleets[chosen])


def gains_of(fleets: Floats, units: Longs) -> Longs:
    """Return what a slot adds for each pair of fleets; units[machines], the last for more."""
    both = np.minimum(fleets[:, None], fleets[None]).sum(axis=(2, 3)).astype(np.int64)
    return units[np.minimum(both, len(units) - 1)]


@compiled
def _solve(cost: Floats, gains: Longs, work: int) -> tuple[float, Longs]:
    """Return the least dollars and the fleet of each slot.

    best[f, w]: least dollars from this slot on, with fleet f held before it and w still to do.
    """
    slots, fleets = cost.shape
    best = np.full((fleets, work + 1), np.inf)
    best[:, 0] = 0.0
    taken = np.zeros((slots, fleets, work + 1), np.int16)
    for slot in range(slots - 1, -1, -1):
        after = best.copy()
        for before in range(fleets):
            for left in range(1, work + 1):
                least, which = np.inf, 0
                for fleet in range(fleets):
                    rest = max(0, left - gains[before, fleet])
                    usd = cost[slot, fleet] + after[fleet, rest]
                    if usd < least:
                        least, which = usd, fleet
                best[before, left] = least
                taken[slot, before, left] = which
    chosen = np.zeros(slots, np.int64)
    before, left = 0, work
    for slot in range(slots):
        if left > 0 and best[0, work] < np.inf:
            chosen[slot] = taken[slot, before, left]
            left = max(0, left - gains[before, chosen[slot]])
            before = chosen[slot]
    return best[0, work], chosen
