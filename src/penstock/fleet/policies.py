"""Policies: which machines to want, from what is seen of the job and of each pool.

A policy is a plain function (view, pools, speed, args, wanted): it writes the machines that it
wants of each pool, preemptible and on demand, into `wanted` [pool, 2].  `view` and `pools` are
laid out in one_future.py; `speed` is steps per second by machines; `args[0]` is the number of
machines that the job asks for.  Each policy is compiled, and so is one of a user's.

The safety net that most share: once the time left is only just enough to do the rest on demand -
start, restart and what a loss may cost included - machines on demand are taken and kept.
"""

import math

import numpy as np

from penstock.fleet.one_future import (
    DEADLINE,
    DONE,
    EVERY,
    HELD,
    HELD_ON_DEMAND,
    NOW,
    OFFERED,
    PAUSE,
    READY,
    READY_ON_DEMAND,
    RISK,
    SAVE,
    START,
    TICK,
    USD,
    USD_ON_DEMAND,
    WORK,
    Floats,
    ruled_by,
)
from penstock.schedule.compiled import kept

_EPS = 1e-6


@kept
def cheapest(pools: Floats, column: int) -> int:
    best = 0
    for pool in range(1, pools.shape[0]):
        if pools[pool, column] < pools[best, column]:
            best = pool
    return best


@kept
def left_s(view: Floats, speed: Floats, machines: float) -> float:
    """Return the seconds that the rest takes with so many machines, its checkpoints included.

    As many checkpoints as there may be: one more than the seconds of work over those between two.
    """
    works_s = (view[WORK] - view[DONE]) / max(speed[min(int(machines), len(speed) - 1)], 1e-300)
    if view[EVERY] == np.inf:
        return works_s
    return works_s + view[SAVE] * (works_s / view[EVERY] + 1)


@kept
def slack_s(view: Floats, speed: Floats, machines: float) -> float:
    """Return the seconds to spare before the deadline if the rest begins on demand now."""
    needs = view[START] + view[PAUSE] + view[RISK] + left_s(view, speed, machines)
    return view[DEADLINE] - view[NOW] - needs


@kept
def is_late(view: Floats, speed: Floats, machines: float) -> bool:
    """Return whether to turn to machines on demand now: at the next tick it would be too late.

    Slack does not shrink while all machines work, and a loss is seen when it comes.
    """
    margin = 0.0 if view[READY] >= machines else view[TICK]
    return slack_s(view, speed, machines) < margin - _EPS


@kept
def _pool_with(pools: Floats, machines: float, most_usd_h: float) -> int:
    """Return the pool that offers so many for at most so much: one that is held, or the cheapest.

    -1 if none does.
    """
    best = -1
    for pool in range(pools.shape[0]):
        if pools[pool, OFFERED] < machines or pools[pool, USD] > most_usd_h:
            continue
        if pools[pool, HELD] >= machines:
            return pool
        if best < 0 or pools[pool, USD] < pools[best, USD]:
            best = pool
    return best


@kept
def want_spot(view: Floats, pools: Floats, machines: float, wanted: Floats) -> bool:
    """Want all machines of one pool, and those on demand that work until they are useful."""
    pool = _pool_with(pools, machines, pools[:, USD_ON_DEMAND].min())
    if pool < 0:
        return False
    wanted[pool, 0] = machines
    are_ready = view[READY] - view[READY_ON_DEMAND] >= machines
    for other in range(pools.shape[0]):
        if not are_ready:
            wanted[other, 1] = pools[other, HELD_ON_DEMAND]
    return True


@ruled_by
def on_demand(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want all machines on demand, from the cheapest pool, all the time."""
    wanted[:] = 0.0
    wanted[cheapest(pools, USD_ON_DEMAND), 1] = args[0]


@ruled_by
def greedy(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want preemptible machines whenever a pool offers enough; nothing else until it is late.

    From then on all on demand, to the end.
    """
    held = pools[:, HELD_ON_DEMAND].sum()
    wanted[:] = 0.0
    if held > 0 or is_late(view, speed, args[0]):
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = args[0]
    else:
        want_spot(view, pools, args[0], wanted)


@ruled_by
def uniform_progress(
    view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats
) -> None:
    """Want preemptible machines when there are; else on demand if behind a steady pace.

    Behind: done < now * work / deadline.  What is on demand stays so until it is ahead by
    2 * start (hysteresis), and changes of zone are free where another pool offers enough.
    Source:  "Can't Be Late", NSDI 2024.
    """
    held = pools[:, HELD_ON_DEMAND].sum()
    pace = view[NOW] * view[WORK] / view[DEADLINE]
    ahead = view[DONE] - pace
    room = 2 * (view[START] + view[PAUSE]) * speed[min(int(args[0]), len(speed) - 1)]
    late = slack_s(view, speed, args[0]) < 2 * (view[START] + view[PAUSE]) + view[TICK]
    wanted[:] = 0.0
    waits = (held > 0 and (late or ahead < room)) or is_late(view, speed, args[0])
    if waits or (not want_spot(view, pools, args[0], wanted) and ahead < 0):
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = args[0]


@kept
def _spread(pools: Floats, machines: float, most_usd_h: float, wanted: Floats) -> None:
    """Want so many preemptible machines, of the cheapest pools first, at most at a price."""
    wanted[:, 0] = 0.0
    while machines > 0:
        best = -1
        for pool in range(pools.shape[0]):
            is_free = wanted[pool, 0] == 0 and pools[pool, OFFERED] >= 1
            is_free = is_free and pools[pool, USD] <= most_usd_h
            if is_free and (best < 0 or pools[pool, USD] < pools[best, USD]):
                best = pool
        if best < 0:
            return
        wanted[best, 0] = min(machines, pools[best, OFFERED])
        machines -= wanted[best, 0]


@ruled_by
def transient(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want preemptible machines only, as many as there are, of the cheapest pools first.

    No deadline is looked at: what saves the work is its checkpoints.
    Source:  "Speeding up Deep Learning with Transient Servers", arXiv:1903.00045.
    """
    wanted[:] = 0.0
    _spread(pools, args[0], np.inf, wanted)


@ruled_by
def anchored(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want args[1] machines on demand always - one of each stage - and the rest preemptible.

    So that all state survives whatever is lost.  All on demand once it is late.
    """
    wanted[:] = 0.0
    sure = min(args[0], args[1])
    if pools[:, HELD_ON_DEMAND].sum() > sure or is_late(view, speed, args[0]):
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = args[0]
    else:
        _spread(pools, args[0] - sure, np.inf, wanted)
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = sure


@ruled_by
def growing(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want n_j = args[1] * args[2]^j preemptible machines at step j, at most what is asked for.

    Source:  "Machine Learning on Volatile Instances", arXiv:2003.05649.
    """
    wanted[:] = 0.0
    grown = min(args[0], math.ceil(args[1] * args[2] ** view[DONE] - 1e-9))
    _spread(pools, grown, np.inf, wanted)


@ruled_by
def bidding(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want args[1] machines while their price is at most args[2], and the rest up to args[3].

    args[3] is at most args[2]; `penstock fleet volatile` finds both.
    Source:  "Machine Learning on Volatile Instances", arXiv:2003.05649.
    """
    wanted[:] = 0.0
    _spread(pools, min(args[0], args[1]), args[2], wanted)
    if pools[:, USD].min() <= args[3]:
        _spread(pools, args[0], args[3], wanted)


@ruled_by
def auto_scaling(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want the fewest machines that are fast enough for the rest; on demand what is not offered.

    Fast enough: 1 + args[1] times the pace that ends at the deadline.  What is held stays until
    it is faster than 1 + 2 * args[1] times the pace (hysteresis).
    Source:  "Scalable, Distributed AI Frameworks", arXiv:2304.13738 (rules on a target throughput).
    """
    wanted[:] = 0.0
    time_s = view[DEADLINE] - view[NOW] - view[START] - view[PAUSE] - view[RISK] - view[TICK]
    work = view[WORK] - view[DONE]
    if view[EVERY] < np.inf:
        time_s -= view[SAVE]
        work *= 1 + view[SAVE] / view[EVERY]
    pace = work / max(time_s, 1e-9)
    machines, have = args[0], pools[:, HELD].sum() + pools[:, HELD_ON_DEMAND].sum()
    for count in range(len(speed) - 1, 0, -1):
        if speed[count] >= (1 + args[1]) * pace and speed[count] > speed[count - 1]:
            machines = float(count)
    if machines < have <= args[0] and speed[int(have)] <= (1 + 2 * args[1]) * pace:
        machines = have
    _spread(pools, machines, pools[:, USD_ON_DEMAND].min(), wanted)
    wanted[cheapest(pools, USD_ON_DEMAND), 1] = machines - wanted[:, 0].sum()


@ruled_by
def liveput(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want the machines of the plan that does most steps over what may come next.

    args[1 + k]: that number of machines where k are offered; `liveput_of` finds them from sampled
    futures.  All on demand once it is late.
    Source:  Parcae, NSDI 2024.
    """
    wanted[:] = 0.0
    if pools[:, HELD_ON_DEMAND].sum() > 0 or is_late(view, speed, args[0]):
        wanted[cheapest(pools, USD_ON_DEMAND), 1] = args[0]
    else:
        offered = min(args[0], pools[:, OFFERED].sum())
        _spread(pools, args[1 + int(offered)], np.inf, wanted)


@ruled_by
def follow(view: Floats, pools: Floats, speed: Floats, args: Floats, wanted: Floats) -> None:
    """Want what a schedule says: args[1:] = slot seconds, slots, slots * pools * 2 counts."""
    slot = min(int(view[NOW] / args[1] + 1e-9), int(args[2]) - 1)
    size = 2 * wanted.shape[0]
    for pool in range(wanted.shape[0]):
        for kind in range(2):
            wanted[pool, kind] = args[3 + slot * size + 2 * pool + kind]
