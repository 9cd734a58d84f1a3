"""Futures: markets that could come, sampled from one that was, with a seed.

Blocks of the past are put one after the other, all pools together, so that zones that lost
machines together do so again; a block keeps its time of day where the past is long enough.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.errors import FleetError
from penstock.fleet.lifetimes import LifeLaw, Lifetimes, by_hour, fits
from penstock.fleet.market import DAY_S, HOUR_S, Floats, Market
from penstock.fleet.spells import spells

_MOST_S = 20 * 366 * DAY_S
_MOST_ROUNDS = 10_000  # of a trace in a block
_ORDERS = 4096  # after which lives come again


def resampled(
    market: Market, count: int, *, seed: int, lasts_s: float, block_s: float = 6 * HOUR_S
) -> Iterator[Market]:
    """Yield `count` futures of `lasts_s` seconds made of blocks of the past.

    Each block begins at a random second of the past, which goes on with its first row after its
    last; of a past of three days and more, at the time of day that it stands at in the future.
    Where two blocks meet, machines that are fewer than before are gone.

    Source:   the circular block bootstrap of Politis and Romano, 1992.
    Raises:   FleetError: no future, a length that is not above 0, or much too short a past.
    """
    _check(market, count, lasts_s, block_s)
    random = np.random.default_rng(seed)
    for _ in range(count):
        yield _future(market, random, lasts_s, block_s)


def _check(market: Market, count: int, lasts_s: float, block_s: float) -> None:
    if count < 1 or not 0 < lasts_s <= _MOST_S or not block_s > 0:
        message = f"{count} futures of {lasts_s / HOUR_S:g} h in blocks of {block_s / HOUR_S:g} h"
        raise FleetError(message, hint="give at least one, and lengths above 0 and below 20 years")
    rounds = min(block_s, lasts_s) / market.until_s
    if rounds > _MOST_ROUNDS and len(market.times_s) > 1:
        message = f"a trace of {market.until_s:g} s is too short for futures of it"
        raise FleetError(
            message, hint="give a longer trace; docs/fleet.md says how its times are read"
        )


def stretches(market: Market, count: int, *, seed: int, lasts_s: float) -> Iterator[Market]:
    """Yield `count` stretches of the past as it was, as far apart as they can begin.

    Each goes on with the first row after the last one.  What lasted long lasts as long again, which
    short blocks break off.

    Raises:   FleetError: as `resampled`.
    """
    _check(market, count, lasts_s, lasts_s)
    random = np.random.default_rng(seed)
    first = random.random()
    for number in range(count):
        start_s = (number + first) / count * market.until_s
        yield _of_parts(market, [(start_s, lasts_s)], random)


def coming(
    market: Market, count: int, *, seed: int, lasts_s: float, machines: int
) -> Iterator[Market]:
    """Yield `count` futures that begin as the market is now, at its end.

    Whether some pool has enough machines or none has, it stays so for as long as such spells of the
    past that were longer than this one went on; one more that ends as soon in each second as they
    did, and this one has not, is among them.  Then a stretch of the past follows that began as such
    a spell ended; any, where none was seen to end.

    Raises:   FleetError: as `resampled`.
    """
    _check(market, count, lasts_s, lasts_s)
    random = np.random.default_rng(seed)
    rests_s, ends_s = _rests(market, machines, count, random)
    for rest_s, end_s in zip(rests_s.tolist(), ends_s.tolist(), strict=True):
        stays_s = min(rest_s, lasts_s)
        parts = [(float(market.times_s[-1]), 0.0)]
        if stays_s < lasts_s:
            parts.append((end_s, lasts_s - stays_s))
        yield _of_parts(market, parts, random, first_s=stays_s)


def _rests(
    market: Market, machines: int, count: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return for how long futures stay as now, and from which second of the past they go on."""
    up = market.machines.max(axis=1) >= machines
    begins = np.flatnonzero(np.concatenate([[True], up[1:] != up[:-1]]))
    edges_s = np.append(market.times_s[begins], market.until_s)
    lasts_s, alike = np.diff(edges_s), up[begins] == up[-1]
    age_s, ended = float(lasts_s[-1]), np.flatnonzero(alike[:-1])
    longer = lasts_s[ended][lasts_s[ended] > age_s] - age_s
    mean_s = float(lasts_s[alike].sum()) / max(1, len(ended))
    at = random.permutation(np.arange(count) % (len(longer) + 1))
    drawn = random.exponential(mean_s, count)
    rests_s = np.where(at < len(longer), np.append(longer, 0.0)[at], drawn)
    if not len(ended):
        return rests_s, (np.arange(count) + random.random()) / count * market.until_s
    goes_on = edges_s[1:][ended][random.permutation(np.arange(count) % len(ended))]
    return rests_s, goes_on


def _future(market: Market, random: np.random.Generator, lasts_s: float, block_s: float) -> Market:
    parts: list[tuple[float, float]] = []
    for block in range(int(np.ceil(lasts_s / block_s))):
        start_s = random.random() * market.until_s
        if market.until_s >= 3 * DAY_S:
            days = np.floor(market.until_s / DAY_S)
            start_s = (np.floor(start_s / DAY_S) % days) * DAY_S + (block * block_s) % DAY_S
        parts.append((start_s, min(block_s, lasts_s - block * block_s)))
    return _of_parts(market, parts, random)


def _of_parts(
    market: Market,
    parts: Sequence[tuple[float, float]],
    random: np.random.Generator,
    *,
    first_s: float = 0.0,
) -> Market:
    """Return stretches of the past one after the other: (its first second, its seconds).

    first_s   for which the row of the first second holds, before the stretch; then it may last 0 s
    """
    times: list[Floats] = []
    rows: list[np.ndarray] = []
    begins: list[int] = []
    done_s = 0.0
    for number, (start_s, part_s) in enumerate(parts):
        if number == 0 and first_s > 0:
            at, row = np.zeros(1), np.array([market.row_at(start_s)])
            part_s = first_s
        else:
            at, row = _cut(market, start_s, part_s)
        times.append(at + done_s)
        rows.append(row)
        begins.append(len(row))
        done_s += part_s
    row_of = np.concatenate(rows)
    machines = market.machines[row_of]
    gone = market.gone[row_of].copy()
    starts = np.cumsum([0, *begins[:-1]])
    before = np.vstack([machines[:1], machines[:-1]])
    were = np.where(np.isfinite(before), before, 0.0)
    fewer = np.maximum(0.0, were - np.minimum(machines, were))
    gone[starts] = fewer[starts]
    gone = np.maximum(gone, fewer)  # also where the past goes round its end
    return replace(
        market,
        times_s=np.concatenate(times),
        machines=machines,
        usd_h=market.usd_h[row_of],
        gone=gone,
        until_s=done_s,
        notes=(),
        lives_s=lives_of(market, random),
    )


def lives_of(market: Market, random: np.random.Generator) -> Floats:
    """Return lives of the machines of each pool: [pool, order]; inf where no law ends them."""
    if not market.laws:
        return market.lives_s
    endless = np.full(_ORDERS, np.inf)
    drawn = [endless if law is None else law.sample(random, _ORDERS) for law in market.laws]
    return np.array(drawn)


def _cut(market: Market, start_s: float, lasts_s: float) -> tuple[Floats, np.ndarray]:
    """Return times from 0 and rows of a stretch that begins anywhere and goes round the end."""
    if len(market.times_s) == 1:
        return np.zeros(1), np.zeros(1, int)
    times: list[Floats] = []
    rows: list[np.ndarray] = []
    done_s = 0.0
    while done_s < lasts_s:
        first = market.row_at(start_s)
        part_s = min(market.until_s - start_s, lasts_s - done_s)
        last = int(np.searchsorted(market.times_s, start_s + part_s, side="left"))
        at = np.maximum(market.times_s[first:last] - start_s, 0.0) + done_s
        times.append(at)
        rows.append(np.arange(first, last))
        done_s, start_s = done_s + part_s, 0.0
        if part_s <= 1e-9:
            break
    at, which = np.unique(np.concatenate(times), return_index=True)
    return at, np.concatenate(rows)[which]


def in_slots(market: Market, slot_s: float) -> Market:
    """Return a market in slots of equal length: the fewest machines of each, and its mean price.

    What is gone in a slot is gone at its beginning.
    """
    slots = max(1, int(np.ceil(market.until_s / slot_s - 1e-9)))
    edges = np.arange(slots) * slot_s
    grid = np.union1d(edges, market.times_s)
    grid = grid[grid < market.until_s]
    rows = np.searchsorted(market.times_s, grid, side="right") - 1
    begins = np.searchsorted(grid, edges)
    machines = np.minimum.reduceat(market.machines[rows], begins, axis=0)
    lasts = np.diff(grid, append=market.until_s)
    total = np.add.reduceat(lasts, begins)[:, None]
    usd_h = np.add.reduceat(market.usd_h[rows] * lasts[:, None], begins, axis=0) / total
    into = np.minimum(np.floor(market.times_s / slot_s + 1e-9).astype(int), slots - 1)
    gone = np.zeros_like(machines)
    np.add.at(gone, into, market.gone)
    return replace(
        market, times_s=edges, machines=machines, usd_h=usd_h, gone=gone, until_s=slots * slot_s
    )


class Fitted(NamedTuple):
    """Laws of the spells in which a pool has enough machines, and in which it has not."""

    up: LifeLaw
    down: LifeLaw


def fitted(market: Market, machines: int) -> tuple[Fitted, ...]:
    """Return the likeliest laws of the spells of each pool with at least so many machines.

    Raises:   FleetError: a pool that was seen to go from one to the other less than twice.
    """
    found: list[Fitted] = []
    for pool in range(len(market.pools)):
        seen = spells(market, pool, machines)
        if min(seen.up_ended.sum(), seen.down_ended.sum()) < 1:
            message = f"{market.pools[pool].name} has no whole spell with {machines} machines"
            raise FleetError(message, hint="resample its blocks instead, or ask for other numbers")
        up, down = Lifetimes(seen.up_s, seen.up_ended), Lifetimes(seen.down_s, seen.down_ended)
        found.append(Fitted(fits(up)[0], fits(down)[0]))
    return tuple(found)


def by_laws(
    market: Market, laws: Sequence[Fitted], count: int, *, seed: int, lasts_s: float, machines: int
) -> Iterator[Market]:
    """Yield futures whose pools have `machines` or none, for spells drawn from their laws.

    An hour of the day in which the past lost most machines shortens spells by as much: time runs
    by `by_hour` times as fast.  Pools are independent; `resampled` keeps them together.
    A pool costs what it did on average while it had enough.
    """
    random = np.random.default_rng(seed)
    pace = _pace(market)
    for _ in range(count):
        edges = [_alternating(law, random, lasts_s, pace) for law in laws]
        times_s = np.unique(np.concatenate([[0.0], *(times for times, _ in edges)]))
        times_s = times_s[times_s < lasts_s]
        tables = [
            up[np.searchsorted(times, times_s, side="right") - 1] * float(machines)
            for times, up in edges
        ]
        offered = np.column_stack(tables)
        before = np.vstack([offered[:1], offered[:-1]])
        usd_h = np.repeat(_mean_usd_h(market)[None], len(times_s), axis=0)
        gone = np.maximum(0.0, before - offered)
        yield replace(
            market,
            times_s=times_s,
            machines=offered,
            usd_h=usd_h,
            gone=gone,
            until_s=lasts_s,
            notes=(),
        )


def _alternating(
    law: Fitted, random: np.random.Generator, lasts_s: float, pace: Floats
) -> tuple[Floats, Floats]:
    """Return times from 0 at which a pool changes, and whether it has enough from each on."""
    times, is_up = [0.0], [1.0 if random.random() < 0.5 else 0.0]
    while times[-1] < lasts_s:
        life = float((law.up if is_up[-1] else law.down).sample(random, 1)[0])
        hour = int(times[-1] % DAY_S // HOUR_S)
        times.append(times[-1] + life / float(pace[hour]))
        is_up.append(1.0 - is_up[-1])
    return np.array(times), np.array(is_up)


def _pace(market: Market) -> Floats:
    """Return the rate at which spells end in each hour after the market's beginning: [24]."""
    if market.until_s < 3 * DAY_S:
        return np.ones(24)  # less than three days say nothing of the hour
    return by_hour(market.times_s, market.gone.sum(axis=1))


def _mean_usd_h(market: Market) -> Floats:
    lasts_s = market.lasts_s()[:, None] * (market.machines > 0)
    total = np.maximum(lasts_s.sum(axis=0), 1e-9)
    return (np.nan_to_num(market.usd_h) * lasts_s).sum(axis=0) / total
