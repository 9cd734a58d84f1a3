"""Kernel: one future, event by event: machines ordered, started, lost and paid by the second.

A policy is asked whenever something changed and at every tick; it writes into `wanted` how many
machines it wants.  Between two events all is constant, so nothing is stepped through.

An order is `start_s` away from being useful and is paid from the order on.  When the members
change, all pause for `reform_s`; where no one is left who has the state, for `restart_s`, and the
steps since the last checkpoint are lost, unless the notice was long enough for one.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.as_python import MACHINE_LOOPS
from penstock.schedule.compiled import kept

Floats: TypeAlias = NDArray[np.float64]

Policy: TypeAlias = Callable[[Floats, Floats, Floats, Floats, Floats], None]

# What a policy sees of the job: view[...]
(
    NOW, DONE, WORK, DEADLINE, READY, READY_ON_DEMAND, SINCE, START, PAUSE, RISK, TICK, CLOCK,
    SAVE, EVERY, VIEW,
) = range(15)  # fmt: skip
# ... and of each pool: pools[pool, ...]
OFFERED, USD, USD_ON_DEMAND, HELD, HELD_ON_DEMAND, POOL_VIEW = range(6)
# What comes out: figures[...]
(
    END, DOLLARS, SPOT_DOLLARS, PAID_S, USEFUL_S, LOST, PREEMPTIONS, CHANGES, CHECKPOINTS, STEPS,
    ROWS, FIGURES,
) = range(12)  # fmt: skip
TIMELINE = 7  # time, preemptible held, on demand held, ready, done, dollars, price
MOST_HELD = 4096
_INSTANT_S = 1e-6  # more than what sums of seconds are rounded by: what is left of less is over
_NEVER = math.inf


class Offers(NamedTuple):
    """The market of one future as arrays: [row], [row, pool]; lives_s [pool, order]."""

    times_s: Floats
    machines: Floats
    usd_h: Floats
    gone: Floats
    lives_s: Floats
    usd_on_demand_h: Floats  # [pool]
    notice_s: Floats  # [pool]
    starts_s: float


class JobRules(NamedTuple):
    """What the job costs besides its steps; seconds, and steps for `work`.

    every_s   between checkpoints; 0.0: each step is in one as soon as it is done
    """

    work: float
    deadline_s: float
    limit_s: float
    tick_s: float
    start_s: float
    reform_s: float
    restart_s: float
    checkpoint_s: float
    every_s: float
    risk_s: float
    has_copies: float
    need: float


class HeldMachines(NamedTuple):
    """Machines, in the order in which they were ordered; the first `num[0]` are there.

    owed:  of each pool, the part of a machine by which what was taken is less than its share.
    """

    num: NDArray[np.int64]
    pool: NDArray[np.int64]
    on_demand: NDArray[np.int64]
    ready_s: Floats
    dies_s: Floats
    orders: NDArray[np.int64]  # [pool]: orders of preemptible machines so far
    owed: Floats


@kept
def _drop(held: HeldMachines, at: int) -> None:
    """Take machine `at` out, keeping the order of the others."""
    last = held.num[0] - 1
    for k in range(at, last):
        held.pool[k] = held.pool[k + 1]
        held.on_demand[k] = held.on_demand[k + 1]
        held.ready_s[k] = held.ready_s[k + 1]
        held.dies_s[k] = held.dies_s[k + 1]
    held.num[0] = last


@kept
def _count(held: HeldMachines, pool: int, on_demand: int) -> int:
    found = 0
    for k in range(held.num[0]):
        if held.pool[k] == pool and held.on_demand[k] == on_demand:
            found += 1
    return found


@kept
def _ready(held: HeldMachines, now: float) -> int:
    found = 0
    for k in range(held.num[0]):
        if held.ready_s[k] <= now:
            found += 1
    return found


@kept
def _take(held: HeldMachines, offers: Offers, row: int, now: float) -> tuple[int, Any]:
    """Take what the cloud takes at `now`; return the machines taken and the shortest notice.

    Of a pool that loses g of its b machines, the job that holds h loses h * g / b, rounded - what
    is rounded away is owed to the next time - and at least so many that it holds no more than are
    left; those that were ordered first.
    """
    taken, notice_s = 0, _NEVER
    at = 0
    while at < held.num[0]:
        if held.dies_s[at] <= now and held.on_demand[at] == 0:
            notice_s = min(notice_s, offers.notice_s[held.pool[at]])
            _drop(held, at)
            taken += 1
        else:
            at += 1
    if row < 1 or offers.times_s[row] != now:
        return taken, notice_s
    for pool in range(len(offers.notice_s)):
        have, before = _count(held, pool, 0), offers.machines[row - 1, pool]
        lose = 0
        if offers.gone[row, pool] > 0 and before > 0 and before < _NEVER:
            share = min(1.0, offers.gone[row, pool] / before)
            held.owed[pool] += have * share
            lose = max(0, math.floor(held.owed[pool] + 0.5))
            held.owed[pool] -= lose
        if have - lose > offers.machines[row, pool]:
            lose = have - int(offers.machines[row, pool])
        if lose >= have:
            lose, held.owed[pool] = have, 0.0
        if lose:
            notice_s = min(notice_s, offers.notice_s[pool])
        taken += lose
        at = 0
        while lose:
            if held.pool[at] == pool and held.on_demand[at] == 0:
                _drop(held, at)
                lose -= 1
            else:
                at += 1
    return taken, notice_s


@kept
def _let_go(held: HeldMachines, pool: int, on_demand: int, surplus: int) -> None:
    """Give machines back, those ordered last first."""
    at = held.num[0] - 1
    while surplus > 0 and at >= 0:
        if held.pool[at] == pool and held.on_demand[at] == on_demand:
            _drop(held, at)
            surplus -= 1
        at -= 1


@kept
def _order(
    held: HeldMachines, offers: Offers, wanted: Floats, now: float, row_start: Floats
) -> None:
    """Give back what is not wanted any more, order what is and can be had.

    row_start   [row of the market, seconds until an order is useful]
    """
    row, start_s = int(row_start[0]), row_start[1]
    for pool in range(wanted.shape[0]):
        for kind in range(2):
            have, want = _count(held, pool, kind), int(max(0.0, wanted[pool, kind]))
            if kind == 0 and want > offers.machines[row, pool]:
                want = int(offers.machines[row, pool])
            if want < have:
                _let_go(held, pool, kind, have - want)
            while have < want and held.num[0] < len(held.pool):
                at = held.num[0]
                held.pool[at], held.on_demand[at] = pool, kind
                held.ready_s[at], held.dies_s[at] = now + start_s, _NEVER
                if kind == 0 and offers.lives_s.shape[1]:
                    order = held.orders[pool] % offers.lives_s.shape[1]
                    held.dies_s[at] = now + offers.lives_s[pool, order]
                    held.orders[pool] += 1
                held.num[0] = at + 1
                have += 1


@kept
def _look(view: Floats, pools: Floats, held: HeldMachines, offers: Offers, row: int) -> None:
    """Write what is held and offered where policies read it."""
    view[READY], view[READY_ON_DEMAND] = 0.0, 0.0
    pools[:, HELD] = 0.0
    pools[:, HELD_ON_DEMAND] = 0.0
    for k in range(held.num[0]):
        is_ready = held.ready_s[k] <= view[NOW]
        if held.on_demand[k]:
            pools[held.pool[k], HELD_ON_DEMAND] += 1
        else:
            pools[held.pool[k], HELD] += 1
        if is_ready:
            view[READY] += 1
            view[READY_ON_DEMAND] += held.on_demand[k]
    for pool in range(pools.shape[0]):
        pools[pool, OFFERED] = offers.machines[row, pool]
        pools[pool, USD] = offers.usd_h[row, pool]


@kept
def _paid_usd_s(held: HeldMachines, offers: Offers, row: int, on_demand: int) -> float:
    """Return dollars per second of what is held of one kind."""
    found = 0.0
    for k in range(held.num[0]):
        if held.on_demand[k] == on_demand:
            pool = held.pool[k]
            usd_h = offers.usd_on_demand_h[pool] if on_demand else offers.usd_h[row, pool]
            found += float(usd_h) / 3600.0
    return found


@kept
def _write(row: Floats, held: HeldMachines, usd_h: float, now: float) -> None:
    """Write time, machines held of both kinds, and the least price into a row of a timeline."""
    sure = 0
    for k in range(held.num[0]):
        sure += held.on_demand[k]
    row[0], row[1], row[2], row[6] = now, held.num[0] - sure, sure, usd_h


@kept
def _next(held: HeldMachines, offers: Offers, row: int, now: float) -> float:
    """Return when the market changes, a machine becomes useful or one dies."""
    found = _NEVER
    if row + 1 < len(offers.times_s):
        found = float(offers.times_s[row + 1])
    for k in range(held.num[0]):
        if held.ready_s[k] > now:
            found = min(found, float(held.ready_s[k]))
        found = min(found, float(held.dies_s[k]))
    return found


@kept
def _some_pool(offers: Offers, row: int, need: float) -> bool:
    return bool(np.any(offers.machines[row] >= need))


def play(  # long: one loop over events, whose state would else be handed about
    policy: Policy,
    args: Floats,
    offers: Offers,
    rules: JobRules,
    speed: Floats,
    timeline: Floats,
) -> Floats:
    """Return the figures of one future.

    speed      [machines]: steps per second with so many; the last entry holds for more
    timeline   [row, TIMELINE]: filled while there is room, for pictures
    """
    num_pools, top = len(offers.notice_s), len(speed) - 1
    held = HeldMachines(
        np.zeros(1, np.int64), np.zeros(MOST_HELD, np.int64), np.zeros(MOST_HELD, np.int64),
        np.zeros(MOST_HELD), np.zeros(MOST_HELD), np.zeros(num_pools, np.int64),
        np.zeros(num_pools),
    )  # fmt: skip
    view: Floats = np.zeros(VIEW)
    pools: Floats = np.zeros((num_pools, POOL_VIEW))
    wanted: Floats = np.zeros((num_pools, 2))
    figures: Floats = np.zeros(FIGURES)
    at: Floats = np.zeros(2)
    pools[:, USD_ON_DEMAND] = offers.usd_on_demand_h
    view[WORK], view[DEADLINE], view[START] = rules.work, rules.deadline_s, rules.start_s
    restart_s, reform_s = float(rules.restart_s), float(rules.reform_s)
    view[PAUSE] = max(restart_s, reform_s)
    view[RISK], view[TICK] = rules.risk_s, rules.tick_s
    every_s: float = rules.every_s if rules.every_s > 0 else _NEVER
    view[SAVE], view[EVERY] = rules.checkpoint_s, every_s
    row, members, must_load = 0, 0, False
    done: float = 0.0
    now: float = 0.0
    safe: float = 0.0
    useful_safe: float = 0.0
    paused_s: float = 0.0
    tick_s: float = 0.0
    ran_s, up_since_s = 0.0, 0.0
    was_up = _some_pool(offers, 0, rules.need)
    while True:
        is_up = _some_pool(offers, row, rules.need)
        if is_up != was_up:
            was_up, up_since_s = is_up, now
        taken, notice_s = _take(held, offers, row, now)
        if taken:
            figures[PREEMPTIONS] += taken
            if rules.every_s == 0:
                safe = max(safe, float(math.floor(done + 1e-9)))
                useful_safe = figures[USEFUL_S]
            if notice_s >= rules.checkpoint_s and notice_s > 0:
                safe, useful_safe, ran_s = done, figures[USEFUL_S], 0.0
            elif rules.has_copies > 0 and _ready(held, now) > 0:
                done = max(safe, math.floor(done + 1e-9))  # the step under way is done again
            else:
                figures[LOST] += done - safe
                ran_s = 0.0
                done, figures[USEFUL_S], must_load = safe, useful_safe, True
        view[NOW], view[DONE], view[SINCE] = now, done, now - up_since_s
        view[CLOCK] = (offers.starts_s + now) % 86400.0
        _look(view, pools, held, offers, row)
        policy(view, pools, speed, args, wanted)
        at[0], at[1] = row, rules.start_s
        _order(held, offers, wanted, now, at)
        ready = _ready(held, now)
        if ready != members or taken:
            figures[CHANGES] += 1
            if ready == 0:
                safe, useful_safe, must_load = done, figures[USEFUL_S], done > 0
            elif must_load:
                paused_s, must_load = max(paused_s, now + restart_s), False  # pyright: ignore
            elif members > 0:
                paused_s = max(paused_s, now + reform_s)  # pyright: ignore
        members = ready
        rate = float(speed[min(ready, top)]) if now >= paused_s else 0.0
        spot, sure = _paid_usd_s(held, offers, row, 0), _paid_usd_s(held, offers, row, 1)
        if figures[ROWS] < len(timeline):
            _write(timeline[int(figures[ROWS])], held, offers.usd_h[row].min(), now)
            timeline[int(figures[ROWS]), 3], timeline[int(figures[ROWS]), 4] = ready, done
            timeline[int(figures[ROWS]), 5] = figures[DOLLARS]
            figures[ROWS] += 1
        if now >= tick_s:
            tick_s = now + rules.tick_s
        until = min(min(tick_s, rules.limit_s), _next(held, offers, row, now))
        if paused_s > now:
            until = min(until, paused_s)
        if rate > 0:
            until = min(until, now + every_s - ran_s)
            end_s = now + (rules.work - done) / rate
            done = rules.work if end_s <= until else done + rate * (until - now)
            until = min(until, end_s)
            ran_s += until - now
            figures[USEFUL_S] += (until - now) * ready
        figures[DOLLARS] += (spot + sure) * (until - now)
        figures[SPOT_DOLLARS] += spot * (until - now)
        figures[PAID_S] += held.num[0] * (until - now)
        now = until
        if done >= rules.work or now >= rules.limit_s:
            break
        if ran_s >= every_s - _INSTANT_S:
            figures[CHECKPOINTS] += 1
            safe, useful_safe, ran_s = done, figures[USEFUL_S], 0.0
            paused_s = now + rules.checkpoint_s
        while row + 1 < len(offers.times_s) and offers.times_s[row + 1] <= now:
            row += 1
    figures[END], figures[STEPS] = now, done
    return figures


@cache
def player() -> Callable[[Policy, Floats, Offers, JobRules, Floats, Floats], Floats]:
    """Return `play` compiled once for all compiled policies."""
    made: Any = kept(play, nogil=True)
    if not isinstance(made, MACHINE_LOOPS):
        return made
    from numba import types

    real, vector, table = _types()
    offers = types.NamedTuple((*(vector, table, table, table, table, vector, vector), real), Offers)
    rules = types.NamedUniTuple(real, len(JobRules._fields), JobRules)
    made.compile((types.FunctionType(_seen()), vector, offers, rules, vector, table))
    made.disable_compile()
    return made


def ruled_by(function: Policy) -> Policy:
    """Return a policy compiled; its machine code is kept on disk if it can be."""
    made: Any = kept(function)
    if isinstance(made, MACHINE_LOOPS):
        made.compile(_seen().args)
        made.disable_compile()
    return made


def _seen() -> Any:
    """Return the type of a policy, as numba writes it."""
    from numba import types

    _, vector, table = _types()
    return types.void(vector, table, vector, vector, table)


def _types() -> tuple[Any, Any, Any]:
    """Return the types of a number, a row of numbers and a table, as numba writes them."""
    from numba import types

    real: Any = types.float64
    return real, real[::1], real[:, ::1]
