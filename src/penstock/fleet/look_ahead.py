"""Look ahead: the policy of least expected dollars that misses no deadline, from sampled futures.

What the futures do from slot to slot is counted as a chain of states - enough machines or not, how
many more or fewer, and for how long - and the expected cost to go is found backwards from the
deadline for every state, amount of work left and fleet held.  A choice after which some outcome
would be late is never taken, because its cost is infinite.

Fleets: 0 none, 1 preemptible, 2 on demand, 3 both (one takes over from the other).
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
    SINCE,
    USD_ON_DEMAND,
    WORK,
    Floats,
    ruled_by,
)
from penstock.fleet.market import Market
from penstock.fleet.policies import cheapest, is_late, want_spot
from penstock.fleet.replay import Ruler
from penstock.fleet.work import FleetJob
from penstock.schedule.compiled import compiled

_AGES = 1.0, 2.0, 4.0, 8.0  # slots
_LEVELS = 3  # of how many machines there are more than enough, and of how many there are fewer
_NEVER = 1e12  # dollars, beside which all others are small
_HEAD = 12  # numbers before the table
_MOST_SLOTS = 600
_FEWEST = 0.01  # times that every state is taken to have been lost and found again


class _StateChain(NamedTuple):
    """States of the market: 2 sides * levels * ages; edges of levels [side, level - 1]."""

    edges: Floats
    moves: Floats  # [state, state]
    lost: Floats  # [state]: chance that the pool held is lost although another has enough
    usd_h: Floats  # [state]: mean price of the cheapest pool with enough


def look_ahead(
    futures: Sequence[Market], job: FleetJob, *, deadline_s: float, slot_s: float
) -> Ruler:
    """Return the policy that is best on average over futures like these.

    slot_s   of the dynamic program: about what a change of machines costs; longer where there
             would be more than 600 slots
    Ignores:  what the time of day tells; prices that change in a state.
    """
    slot_s = max(slot_s, deadline_s / _MOST_SLOTS)
    chain = _fitted([in_slots(future, slot_s) for future in futures], job.size)
    work = math.ceil(job.seconds(job.size) / slot_s - 1e-9)
    slots = math.floor(deadline_s / slot_s + 1e-9)
    sure_usd_h = min(pool.usd_h for pool in futures[0].pools)
    hourly = job.size * slot_s / 3600
    best = _solved(chain, hourly, sure_usd_h, work=work, slots=slots)
    head = np.zeros(_HEAD - 1)
    head[:3] = slot_s, work, slots
    head[3 : 3 + chain.edges.size] = chain.edges.ravel()
    return Ruler("look_ahead", expecting, (), np.concatenate([head, best.ravel()]))


# -- the chain -------------------------------------------------------------------------------------


def _fitted(futures: Sequence[Market], machines: int) -> _StateChain:
    most = [future.machines.max(axis=1) - machines for future in futures]
    all_of = np.concatenate(most)
    edges = np.array([_edges(all_of[all_of < 0]), _edges(all_of[all_of >= 0])])
    states = 2 * _LEVELS * (len(_AGES) + 1)
    moves, lost = np.zeros((states, states)), np.zeros((2, states))
    paid = np.zeros((2, states))
    for future, margin in zip(futures, most, strict=True):
        state = _states(margin, edges)
        np.add.at(moves, (state[:-1], state[1:]), 1.0)
        enough = future.machines >= machines
        usd_h = np.where(enough, future.usd_h, np.inf)
        pool = np.argmin(usd_h, axis=1)
        up: NDArray[np.bool_] = np.any(enough, axis=1)
        np.add.at(paid[0], state[up], usd_h.min(axis=1)[up])
        np.add.at(paid[1], state[up], 1.0)
        stays = up[:-1] & up[1:]
        still = enough[np.arange(1, len(up)), pool[:-1]]
        np.add.at(lost[0], state[1:][stays], ~still[stays])
        np.add.at(lost[1], state[1:][stays], 1.0)
    _smooth(moves)
    mean = paid[0].sum() / max(1.0, paid[1].sum())
    usd_h = (paid[0] + mean) / (paid[1] + 1.0)
    return _StateChain(edges, moves, lost[0] / np.maximum(1.0, lost[1]), usd_h)


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
    chain: _StateChain, hourly: float, sure_usd_h: float, *, work: int, slots: int
) -> Floats:
    """Return the best fleet for [slots left, work left, state], two bits for each fleet held."""
    states = len(chain.moves)
    up = np.arange(states) >= states // 2
    usd = np.zeros((4, states))
    usd[1], usd[2] = hourly * chain.usd_h, hourly * sure_usd_h
    usd[3] = usd[1] + usd[2]
    usd[1::2, ~up] = _NEVER
    value = np.full((4, work + 1, states), _NEVER)
    value[:, 0] = 0.0
    best = np.zeros((slots + 1, work + 1, states))
    for left in range(1, slots + 1):
        mixed = value.copy()
        for fleet in (1, 3):
            mixed[fleet] += chain.lost * up * (value[fleet - 1] - value[fleet])
        after = mixed @ chain.moves.T
        stays = usd[:, None] + after
        works = np.concatenate([stays[:, :1], usd[:, None] + after[:, :-1]], axis=1)
        pick = np.zeros((4, work + 1, states), np.int64)
        for held in range(4):
            ways = np.array([works[new] if held & new else stays[new] for new in range(4)])
            pick[held] = np.argmin(ways, axis=0)
            value[held] = np.minimum(ways.min(axis=0), _NEVER)
        for held in (1, 3):  # what is held goes when there are not enough
            value[held][:, ~up] = value[held - 1][:, ~up]
            pick[held][:, ~up] = pick[held - 1][:, ~up]
        value[:, 0] = 0.0
        best[left] = pick[0] + 4 * pick[1] + 16 * pick[2] + 64 * pick[3]
    return best


# -- the policy ------------------------------------------------------------------------------------


@compiled
def _state_of(margin: float, age: float, args: Floats) -> int:
    up = 1 if margin >= 0 else 0
    level, ages = 0, 0
    for k in range(_LEVELS - 1):
        if margin >= args[4 + up * (_LEVELS - 1) + k]:
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
    held = 1 if pools[:, HELD].max() >= machines else 0
    held += 2 if pools[:, HELD_ON_DEMAND].sum() >= machines else 0
    size = 2 * _LEVELS * (len(_AGES) + 1)
    pick = 2
    if time > 0:
        at = _HEAD + (max(0, time) * (work + 1) + max(0, left)) * size + state
        pick = (int(args[at]) >> (2 * held)) & 3
    wanted[:] = 0.0
    if pick % 2 == 1 and not is_late(view, speed, machines):
        want_spot(view, pools, machines, wanted)
        if held != 3:  # neither takes over from the other
            wanted[:, 1] = 0.0
    if pick >= 2 or is_late(view, speed, machines):
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = machines
