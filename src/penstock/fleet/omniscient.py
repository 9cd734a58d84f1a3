"""Omniscient: the cheapest that anyone could have done who knew the market to come.

An exact dynamic program over slots: in which to work, with the preemptible machines of which pool,
of least dollars, so that the work is done by the deadline.  What a pool does not offer stands
beside on demand.  A machine is useful from the second slot on in which it is held.  So before the
first slot of work there is one of starting, and who knows that some machines will be taken holds
as many more in the slot before.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.one_future import Floats
from penstock.schedule.compiled import kept

Longs = NDArray[np.int64]
_MOST_SPARE = 2.0  # times the machines that are asked for


class Slots(NamedTuple):
    """A future in slots of equal length: [slot, pool]; taken: the share lost as a slot begins."""

    slot_s: float
    machines: Floats
    usd_h: Floats
    usd_on_demand_h: Floats  # [pool]
    taken: Floats


class UsdBound(NamedTuple):
    """What the best costs, and what it holds: wanted [slot, pool, 2]; inf if nothing is in time."""

    usd: float
    wanted: Floats


class _Needs(NamedTuple):
    """What work in a slot needs: [slot, pool]; usd: of an hour.

    held     preemptible machines in the slot before
    left     of them when it begins; the rest of the machines is on demand
    """

    held: Floats
    left: Floats
    start_usd_h: Floats  # in the slot before the first of work: what the next one needs
    run_usd_h: Floats  # in a slot of work
    more_usd_h: Floats  # besides, where the next one is of work too


def omniscient(slots: Slots, *, machines: int, work: int) -> UsdBound:
    """Return the least dollars to work in `work` of the slots on so many machines."""
    pools, sure = slots.machines.shape[1], float(slots.usd_on_demand_h.min())
    needs = _needs(slots, machines, sure)
    state = states_of(pools)
    start, run, more = (np.ascontiguousarray(part * slots.slot_s / 3600) for part in needs[2:])
    usd, chosen = _solve(start, run, more, state, work)
    wanted = np.zeros((*slots.machines.shape, 2))
    at = int(np.argmin(slots.usd_on_demand_h))
    for slot, (run, start) in enumerate(state[chosen].tolist()):
        after = state[chosen[slot + 1]][0] if slot + 1 < len(chosen) else -1
        if run >= 0:
            wanted[slot, run, 0] = needs.left[slot, run]
            wanted[slot, at, 1] = machines - needs.left[slot, run]
        if after >= 0 and after in (run, start):
            held, beside = needs.held[slot + 1, after], machines - needs.left[slot + 1, after]
            wanted[slot, after, 0] = max(wanted[slot, after, 0], held)
            extra = wanted[slot, at, 1] + beside if after == start >= 0 else beside
            wanted[slot, at, 1] = max(wanted[slot, at, 1], extra)
    return UsdBound(float(usd), wanted)


def states_of(pools: int) -> Longs:
    """Return the states of a slot: (pool that works, pool that starts), -1 for none."""
    found = [(-1, -1)]
    found += [(-1, pool) for pool in range(pools)] + [(pool, -1) for pool in range(pools)]
    found += [(run, start) for run in range(pools) for start in range(pools) if run != start]
    return np.array(found, np.int64)


def _needs(slots: Slots, machines: int, sure_usd_h: float) -> _Needs:
    shape = slots.machines.shape
    held, left = np.zeros(shape), np.zeros(shape)
    usd_h = np.nan_to_num(slots.usd_h, nan=sure_usd_h)
    for slot in range(1, shape[0]):
        for pool in range(shape[1]):
            most = min(slots.machines[slot - 1, pool], _MOST_SPARE * machines)
            counts = np.arange(int(most) + 1.0)
            stay = counts - np.floor(counts * slots.taken[slot, pool] + 1e-9)
            stay = np.minimum(np.minimum(stay, slots.machines[slot, pool]), machines)
            usd = counts * usd_h[slot - 1, pool] + stay * usd_h[slot, pool]
            usd += 2 * (machines - stay) * sure_usd_h
            best = int(np.argmin(usd))
            held[slot, pool], left[slot, pool] = counts[best], stay[best]
    fill = machines - left
    run = left * usd_h + fill * sure_usd_h
    after, fill_after = np.roll(held, -1, axis=0), np.roll(fill, -1, axis=0)
    start = after * usd_h + fill_after * sure_usd_h
    more = np.maximum(0.0, after - left) * usd_h + np.maximum(0.0, fill_after - fill) * sure_usd_h
    return _Needs(held, left, start, run, more)


@kept
def _solve(
    start: Floats, run: Floats, more: Floats, state: Longs, work: int
) -> tuple[float, Longs]:
    """Return the least dollars and what each slot is.

    best[f, w]: least dollars from this slot on, after a slot that was f and with w still to do.
    """
    slots, states = len(start), len(state)
    best = np.full((states, work + 1), np.inf)
    best[:, 0] = 0.0
    taken = np.zeros((slots, states, work + 1), np.int16)
    for slot in range(slots - 1, -1, -1):
        after = best.copy()
        best[:, 1:] = np.inf
        for before in range(states):
            for now in range(states):
                usd, own, new = 0.0, state[now, 0], state[now, 1]
                if own >= 0 and (slot == 0 or own not in (state[before, 0], state[before, 1])):
                    continue
                if own >= 0 and own == state[before, 0]:
                    usd += more[slot - 1, own]
                if own >= 0:
                    usd += run[slot, own]
                if new >= 0:
                    usd += start[slot, new]
                done = 1 if own >= 0 else 0
                for left in range(1, work + 1):
                    rest = after[now, left - done]
                    if usd + rest < best[before, left]:
                        best[before, left] = usd + rest
                        taken[slot, before, left] = now
    chosen = np.zeros(slots, np.int64)
    before, left = 0, work
    for slot in range(slots):
        if left > 0 and best[0, work] < np.inf:
            chosen[slot] = taken[slot, before, left]
            left -= 1 if state[chosen[slot], 0] >= 0 else 0
            before = chosen[slot]
    return best[0, work], chosen
