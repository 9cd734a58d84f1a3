"""Look ahead: the policy of least expected dollars that misses no deadline, from sampled futures.

What the futures do from slot to slot is counted as a chain of states - enough machines or not, how
many more or fewer, and for how long - and the expected cost to go is found backwards from the
deadline for every state, amount of work left and fleet held.  A choice after which some outcome
would be late is never taken, because its cost is infinite.

Fleets: 0 none; 1 mixed: as many preemptible machines of a pool as it offers, the rest on demand;
2 all on demand.  Machines are also lost one by one while enough stay, and each leaves the job
waiting for a start; so a mixed fleet has some spare ones, as many as make an hour of work cheapest
in the sampled futures.  What is held stays until what takes over from it is useful.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.fleet.futures import in_slots
from penstock.fleet.kernel import (
    DEADLINE,
    DONE,
    HELD,
    HELD_ON_DEMAND,
    NOW,
    OFFERED,
    READY,
    READY_ON_DEMAND,
    SINCE,
    USD,
    USD_ON_DEMAND,
    WORK,
    Floats,
    ruled_by,
)
from penstock.fleet.market import HOUR_S, Market
from penstock.fleet.policies import cheapest, is_late
from penstock.fleet.replay import Ruler, replay_all
from penstock.fleet.work import FleetJob
from penstock.schedule.compiled import compiled

_AGES = 1.0, 2.0, 4.0, 8.0  # slots
_LEVELS = 3  # of how many machines there are more than enough, and of how many there are fewer
_NEVER = 1e12  # dollars, beside which all others are small
_HEAD = 13  # numbers before the table
_WORDS = -(-2 * _LEVELS * (len(_AGES) + 1) // 8)  # numbers that hold what all states say
_MOST_SLOTS = 600
_PARTS = 4  # of a slot, in which what becomes of a fleet is followed
_TRIED = 50  # futures that numbers of spare machines are tried on
_FEWEST = 0.01  # times that every state is taken to have been lost and found again


class _StateChain(NamedTuple):
    """States of the market: 2 sides * levels * ages; edges of levels [side, level - 1].

    works        [state]: chance that a slot in which a mixed fleet is held is one of work, below 1
    usd_h        [state]: mean dollars per hour of its preemptible machines
    fill_usd_h   [state]: of those on demand
    first_usd_h  [state]: of those on demand, if nothing was held before
    """

    edges: Floats
    moves: Floats  # [state, state]
    works: Floats
    usd_h: Floats
    fill_usd_h: Floats
    first_usd_h: Floats


def look_ahead(
    futures: Sequence[Market], job: FleetJob, *, deadline_s: float, slot_s: float
) -> Ruler:
    """Return the policy that is best on average over futures like these.

    slot_s   of the dynamic program: about what a change of machines costs; longer where there
             would be more than 600 slots
    Ignores:  what the time of day tells; prices that change in a state; plans for fewer machines.
    """
    slot_s = max(slot_s, deadline_s / _MOST_SLOTS)
    slots = [in_slots(future, slot_s) for future in futures]
    parts = [in_slots(future, slot_s / _PARTS) for future in futures]
    tried, best, least, best_at = futures[:_TRIED], None, math.inf, 0
    for at, spare in enumerate(_spares(job.size)):
        ruler = _with_spares((slots, parts), job, spare, deadline_s=deadline_s, slot_s=slot_s)
        usd = _mean_usd(tried, job, ruler, deadline_s)
        if usd < least:
            best, least, best_at = ruler, usd, at
        elif at > best_at + 2:
            break
    assert best is not None, "the first is the best so far"
    return best


def _spares(machines: int) -> list[int]:
    """Return numbers of spare machines to try: 0, 1, 2, 3, 4, 6, 8, 12, ... up to `machines`."""
    found = {0, *(factor << k for k in range(machines.bit_length()) for factor in (1, 3))}
    return sorted(spare for spare in found if spare <= machines)


def _with_spares(
    futures: tuple[Sequence[Market], Sequence[Market]],
    job: FleetJob,
    spare: int,
    *,
    deadline_s: float,
    slot_s: float,
) -> Ruler:
    """Return the best policy with so many spare machines.

    futures   in slots, and in parts of slots
    """
    sure_usd_h = min(pool.usd_h for pool in futures[0][0].pools)
    held = [
        _held(part.machines, part.gone, part.usd_h, sure_usd_h, job.size, spare)
        for part in futures[1]
    ]
    chain = _fitted(futures[0], job.size, held)
    work = math.ceil(job.seconds(job.size) / slot_s - 1e-9)
    slots = math.floor(deadline_s / slot_s + 1e-9)
    best = _solved(chain, job.size * sure_usd_h, slot_s / 3600, work=work, slots=slots)
    head = np.zeros(_HEAD - 1)
    head[:4] = slot_s, work, slots, spare
    head[4 : 4 + chain.edges.size] = chain.edges.ravel()
    return Ruler("look_ahead", expecting, (), np.concatenate([head, best.ravel()]))


def _mean_usd(futures: Sequence[Market], job: FleetJob, ruler: Ruler, deadline_s: float) -> float:
    """Return the mean dollars of a policy; what is late is dear."""
    runs = replay_all(futures, job, lambda _: ruler, deadline_s=deadline_s)
    late = sum(run.hours * HOUR_S > deadline_s * (1 + 1e-9) for run in runs)
    return sum(run.usd for run in runs) / len(runs) + _NEVER * late


# -- a mixed fleet ---------------------------------------------------------------------------------


@compiled
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


@compiled
def _spot_of(offered: float, size: float, spare: float) -> float:
    return math.floor(min(offered, size + spare))


@compiled
def _fill_of(spot: float, size: float, spare: float) -> float:
    """Return the number of machines on demand beside `spot` preemptible ones.

    Spare ones are there in proportion to those that may be lost.
    """
    return max(0.0, size + math.ceil(spare * spot / (size + spare)) - spot)


class _HeldSlots(NamedTuple):
    """What becomes of a job that always holds a mixed fleet, slot by slot.

    works        part of the slot in which enough machines are useful
    usd_h        dollars per hour of its preemptible machines
    fill_usd_h   of those on demand: those that stand beside, and those not taken over from yet
    first_usd_h  of those on demand, were all of them ordered anew
    """

    works: Floats
    usd_h: Floats
    fill_usd_h: Floats
    first_usd_h: Floats


@compiled
def _lose(row: Floats, lost: float) -> None:
    """Take `lost` machines from a row, from its end: those that were ordered first."""
    for at in range(len(row) - 1, -1, -1):
        part = min(row[at], lost)
        row[at] -= part
        lost -= part


@compiled
def _hold(row: Floats, wanted: float) -> None:
    """Hold `wanted` machines: give back those ordered last, or order more at the row's start."""
    surplus = row.sum() - wanted
    row[0] += max(0.0, -surplus)
    for at in range(len(row)):
        part = min(row[at], max(0.0, surplus))
        row[at] -= part
        surplus -= part


@compiled
def _held(
    machines: Floats, gone: Floats, usd_h: Floats, sure_usd_h: float, size: int, spare: int
) -> _HeldSlots:
    """Return the course of a mixed fleet on a market, in parts of slots, `_PARTS` to a slot.

    What is ordered in a part is useful a slot later.
    """
    count = len(machines) // _PARTS
    found = _HeldSlots(np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count))
    pool, owed = -1, 0.0
    spots, sures = np.zeros(_PARTS + 1), np.zeros(_PARTS + 1)  # by age; the last are useful
    for part in range(count * _PARTS):
        for row in (spots, sures):
            row[_PARTS] += row[_PARTS - 1]
            row[1:_PARTS] = row[: _PARTS - 1].copy()
            row[0] = 0.0
        if pool >= 0 and part > 0:
            have, before = spots.sum(), machines[part - 1, pool]
            if gone[part, pool] > 0 and 0 < before < np.inf:
                owed += have * min(1.0, gone[part, pool] / before)
            lost = max(0.0, math.floor(owed + 0.5))
            owed -= lost
            lost = max(lost, have - machines[part, pool])
            owed = 0.0 if lost >= have else owed
            _lose(spots, lost)
        other = _pool_for(machines[part], usd_h[part], pool, size)
        if other != pool:
            pool, owed = other, 0.0
            spots[:] = 0.0
        spot = 0.0 if pool < 0 else _spot_of(machines[part, pool], size, spare)
        _hold(spots, spot)
        fill = _fill_of(spot, size, spare)
        stays = min(sures.sum(), _fill_of(spots[_PARTS], size, spare))
        _hold(sures, max(fill, stays))
        slot = part // _PARTS
        found.works[slot] += (spots[_PARTS] + sures[_PARTS] >= size) / _PARTS
        if pool >= 0:
            found.usd_h[slot] += spot * usd_h[part, pool] / _PARTS
        found.fill_usd_h[slot] += sures.sum() * sure_usd_h / _PARTS
        found.first_usd_h[slot] += fill * sure_usd_h / _PARTS
    return found


# -- the chain -------------------------------------------------------------------------------------


def _fitted(futures: Sequence[Market], machines: int, runs: Sequence[_HeldSlots]) -> _StateChain:
    most = [future.machines.max(axis=1) - machines for future in futures]
    all_of = np.concatenate(most)
    edges = np.array([_edges(all_of[all_of < 0]), _edges(all_of[all_of >= 0])])
    states = 2 * _LEVELS * (len(_AGES) + 1)
    moves, seen = np.zeros((states, states)), np.zeros(states)
    sums = np.zeros((4, states))
    for run, margin in zip(runs, most, strict=True):
        state = _states(margin, edges)[: len(run.works)]  # without a last slot that is not whole
        np.add.at(moves, (state[:-1], state[1:]), 1.0)
        np.add.at(seen, state[1:], 1.0)
        for at, column in enumerate(run):
            np.add.at(sums[at], state[1:], column[1:])
    _smooth(moves)
    mean = sums.sum(axis=1, keepdims=True) / max(1.0, seen.sum())
    works, *usd_h = (sums + mean) / (seen + 1.0)
    return _StateChain(edges, moves, np.minimum(works, 1 - _FEWEST), *usd_h)


def _edges(margins: Floats) -> Floats:
    """Return where the levels of one side are cut, by how often each margin occurs."""
    if not len(margins):
        return np.full(_LEVELS - 1, np.inf)
    finite = np.where(np.isfinite(margins), margins, 1e9)
    return np.quantile(finite, np.arange(1, _LEVELS) / _LEVELS, method="higher")


def _states(margin: Floats, edges: Floats) -> NDArray[np.int64]:
    """Return the state of each slot of one future."""
    up = margin >= 0
    flips = np.flatnonzero(np.concatenate([[True], up[1:] != up[:-1]]))
    age = np.arange(len(up)) - np.repeat(flips, np.diff(np.append(flips, len(up))))
    level = np.where(
        up,
        np.searchsorted(edges[1], margin, side="right"),
        np.searchsorted(edges[0], margin, side="right"),
    )
    ages = np.searchsorted(np.array(_AGES), age, side="right")
    return (up * _LEVELS + level) * (len(_AGES) + 1) + ages


def _smooth(moves: Floats) -> None:
    """Make counts into chances; from every state both sides can be reached, if only hardly."""
    ages, half = len(_AGES) + 1, len(moves) // 2
    for state in range(len(moves)):
        if not moves[state].sum():
            moves[state, state] = 1.0
        other = np.arange(half) + (half if state < half else 0)
        moves[state, other[::ages]] += _FEWEST / _LEVELS
    moves /= moves.sum(axis=1, keepdims=True)


# -- the dynamic program ---------------------------------------------------------------------------


def _solved(
    chain: _StateChain, sure_usd_h: float, slot_h: float, *, work: int, slots: int
) -> Floats:
    """Return the best fleet for [slots left, work left, state / 8].

    Six bits for each state, of which two for each fleet held, eight states in a number.
    All on demand where nothing can be sure to be in time.
    sure_usd_h   of all machines on demand
    """
    states = len(chain.moves)
    spot, sure = chain.usd_h * slot_h, np.full(states, sure_usd_h * slot_h)
    mixed = spot + chain.fill_usd_h * slot_h
    nothing, always = np.zeros(states), np.ones(states)
    first = spot + chain.first_usd_h * slot_h
    # by fleet held and fleet wanted: dollars of the slot, and the chance that it is one of work
    usd = np.array(
        [(nothing, first, sure), (nothing, mixed, mixed + sure), (nothing, spot + sure, sure)]
    )
    chance = np.zeros((3, 3, states))
    chance[1, 1:], chance[2, 1:] = chain.works, always
    value = np.full((3, work + 1, states), _NEVER)
    value[:, 0] = 0.0
    best = np.zeros((slots + 1, work + 1, _WORDS))
    for left in range(1, slots + 1):
        _choose(value @ chain.moves.T, usd, chance, value, best[left])
    return best


@compiled
def _choose(after: Floats, usd: Floats, chance: Floats, value: Floats, best: Floats) -> None:
    """Write the least dollars from a slot on and the fleets that cost them, for each fleet held.

    after   [fleet, work left, state]: dollars from the next slot on
    """
    for left in range(1, after.shape[1]):
        for state in range(after.shape[2]):
            code = 0
            for held in range(3):
                least, pick = _NEVER, 2
                for new in range(3):
                    idle, done = after[new, left, state], after[new, left - 1, state]
                    found = usd[held, new, state] + idle + chance[held, new, state] * (done - idle)
                    if found < least:
                        least, pick = found, new
                value[held, left, state] = least
                code += pick << (2 * held)
            best[left, state // 8] += float(code << (6 * (state % 8)))


# -- the policy ------------------------------------------------------------------------------------


@compiled
def _state_of(margin: float, age: float, args: Floats) -> int:
    up = 1 if margin >= 0 else 0
    level, ages = 0, 0
    for k in range(_LEVELS - 1):
        if margin >= args[5 + up * (_LEVELS - 1) + k]:
            level += 1
    for k in range(len(_AGES)):
        if age >= _AGES[k]:
            ages += 1
    return (up * _LEVELS + level) * (len(_AGES) + 1) + ages


@ruled_by
def expecting(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want what the table of `look_ahead` says of the state, the work and the time left."""
    machines, slot_s = args[0], args[1]
    work, slots = int(args[2]), int(args[3])
    rest_s: Any = (view[WORK] - view[DONE]) / speed[min(int(machines), len(speed) - 1)]
    left = min(work, math.ceil(rest_s / slot_s - 1e-6))
    time_s: Any = view[DEADLINE] - view[NOW]
    time = min(slots, math.floor(time_s / slot_s + 1e-6))
    state = _state_of(pools[:, OFFERED].max() - machines, view[SINCE] / slot_s + 1e-6, args)
    own, pool, spot = -1, -1, 0.0
    for k in range(pools.shape[0]):
        if pools[k, HELD] > 0 and (own < 0 or pools[k, HELD] > pools[own, HELD]):
            own = k
    pool = _pool_for(pools[:, OFFERED], pools[:, USD], own, machines)
    if pool >= 0:
        spot = _spot_of(pools[pool, OFFERED], machines, args[4])
    ready, sure = view[READY] - view[READY_ON_DEMAND], pools[:, HELD_ON_DEMAND].sum()
    held = 0
    if sure >= machines and ready < max(1.0, spot):
        held = 2
    elif 2 * (pools[:, HELD].sum() + sure) > machines:  # some were lost
        held = 1
    pick = 2
    if time > 0 and not is_late(view, speed, machines):
        at = _HEAD + (time * (work + 1) + max(0, left)) * _WORDS + state // 8
        pick = (int(args[at]) >> (6 * (state % 8) + 2 * held)) & 3
    wanted[:] = 0.0
    if pick == 1:
        if pool >= 0:
            wanted[pool, 0] = spot
        fill = _fill_of(spot, machines, args[4])
        stays = min(sure, _fill_of(min(ready, spot), machines, args[4]))
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = max(fill, stays)
    elif pick == 2:
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = machines
        if view[READY_ON_DEMAND] < machines:  # until those on demand are useful
            wanted[:, 0] = pools[:, HELD]
