"""Market: how many preemptible machines each pool offers over time, and at which price.

A pool is what is bought and lost together: one kind of machine in one zone.  All pools share one
axis of times, so that zones that lose machines together do so in whatever is made of a market.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import FleetError

if TYPE_CHECKING:
    from penstock.fleet.lifetimes import LifeLaw

Floats: TypeAlias = NDArray[np.float64]

HOUR_S = 3600.0
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class MarketPool:
    """A kind of machine in one place.

    usd_h     dollars per hour of one machine on demand; 0.0: not known
    notice_s  seconds that the cloud warns before it takes a preemptible machine
    Raises:   FleetError: no name, or a number below zero or none.
    """

    name: str
    usd_h: float = 0.0
    notice_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise FleetError("a pool has an empty name", hint="name it: the zone, or the machine")
        for what, number in (("usd_h", self.usd_h), ("notice_s", self.notice_s)):
            if not 0 <= number < math.inf:
                hint = "give 0 or more"
                raise FleetError(f'pool "{self.name}" has {what} = {number}', hint=hint)


@dataclass(frozen=True, slots=True, eq=False)
class Market:
    """What was, or will be, offered: row k holds from times_s[k] until times_s[k + 1].

    times_s   [row], increasing, from 0.0
    machines  [row, pool]: preemptible machines that can be held; inf where nothing limits them
    usd_h     [row, pool]: dollars per hour of a preemptible machine; nan where not known
    gone      [row, pool]: machines taken at times_s[row], also where others came at once
    until_s   where the last row ends
    starts_s  seconds after midnight of times_s[0]
    begins_s  what the file says for times_s[0], in seconds; after 1970, if they are dates
    notes     what a reader should know of the file that it is from
    laws      of each pool, of how long a machine of it lasts from its order; empty: the rows alone
              say what is lost
    lives_s   [pool, order]: lives drawn from the laws; no columns: none were drawn
    Raises:   FleetError: no rows or pools, times that do not increase, numbers below zero.
    """

    pools: tuple[MarketPool, ...]
    times_s: Floats
    machines: Floats
    usd_h: Floats
    gone: Floats
    until_s: float
    starts_s: float = 0.0
    notes: tuple[str, ...] = ()
    laws: "tuple[LifeLaw | None, ...]" = ()
    lives_s: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    begins_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.pools or not len(self.times_s):
            raise FleetError("a market without pools or rows", hint="read it from a trace")
        shape = len(self.times_s), len(self.pools)
        for name in ("machines", "usd_h", "gone"):
            of: Floats = getattr(self, name)
            if of.shape != shape:
                raise ValueError(f"{name} has shape {of.shape}, not {shape}")
            if np.any(of < 0) or (name != "usd_h" and np.any(np.isnan(of))):
                message = f"{name} of a market has a value below zero, or none"
                raise FleetError(message, hint="correct the trace")
        if self.times_s[0] != 0 or np.any(np.diff(self.times_s) <= 0):
            raise FleetError("times of a market do not increase from 0", hint="sort its rows")
        if not float(self.times_s[-1]) < self.until_s < math.inf:
            message = f"the last row begins at {self.times_s[-1]} s, the market ends at "
            raise FleetError(f"{message}{self.until_s} s", hint="give it a later end")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the pools."""
        return tuple(pool.name for pool in self.pools)

    def lasts_s(self) -> Floats:
        """Return for how long each row holds, in seconds [row]."""
        return np.diff(self.times_s, append=self.until_s)

    def share_up(self, machines: int) -> Floats:
        """Return the share of time in which each pool offers at least so many: [pool]."""
        up = self.machines >= machines
        return self.lasts_s() @ up / self.until_s

    def row_at(self, time_s: float) -> int:
        """Return the row that holds at a time; the last one after the end."""
        return max(0, int(np.searchsorted(self.times_s, time_s, side="right")) - 1)


def only(market: Market, names: Sequence[str]) -> Market:
    """Return the pools of a market that are named, in that order.

    Raises:   FleetError: it has no such pool.
    """
    known = market.names
    for name in names:
        if name not in known:
            few = ", ".join(known[:6]) + (" ..." if len(known) > 6 else "")
            raise FleetError(f"there is no pool {name!r}", hint=f"it has {few}")
    at = [known.index(name) for name in names]
    pools = tuple(market.pools[k] for k in at)
    return replace(
        market,
        pools=pools,
        machines=market.machines[:, at],
        usd_h=market.usd_h[:, at],
        gone=market.gone[:, at],
        laws=tuple(market.laws[k] for k in at) if market.laws else (),
    )


def begin_of(market: Market, lasts_s: float) -> Market:
    """Return the first seconds of a market, all of it if it is shorter."""
    if market.until_s <= lasts_s:
        return market
    rows = int(np.searchsorted(market.times_s, lasts_s, side="left"))
    return replace(
        market,
        times_s=market.times_s[:rows],
        machines=market.machines[:rows],
        usd_h=market.usd_h[:rows],
        gone=market.gone[:rows],
        until_s=lasts_s,
    )


def together(markets: Sequence[Market]) -> Market:
    """Return the pools of several markets on one axis; it ends where the first of them ends.

    Raises:   FleetError: two pools have one name.
    """
    names = [name for market in markets for name in market.names]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        hint = "give each file once; the pool is named in it, or after the file"
        raise FleetError(f"two pools are called {double!r}", hint=hint)
    until_s = min(market.until_s for market in markets)
    times_s = np.unique(np.concatenate([market.times_s for market in markets]))
    times_s = times_s[times_s < until_s]
    at = [np.searchsorted(m.times_s, times_s, side="right") - 1 for m in markets]
    gone = [
        np.where(np.isin(times_s, m.times_s)[:, None], m.gone[rows], 0.0)
        for m, rows in zip(markets, at, strict=True)
    ]
    pairs = [*zip(markets, at, strict=True)]
    return Market(
        tuple(pool for market in markets for pool in market.pools),
        times_s,
        np.concatenate([m.machines[rows] for m, rows in pairs], axis=1),
        np.concatenate([m.usd_h[rows] for m, rows in pairs], axis=1),
        np.concatenate(gone, axis=1),
        until_s,
        markets[0].starts_s,
        tuple(note for market in markets for note in market.notes),
        _laws(markets),
    )


def _laws(markets: Sequence[Market]) -> "tuple[LifeLaw | None, ...]":
    if not any(market.laws for market in markets):
        return ()
    return tuple(law for market in markets for law in market.laws or (None,) * len(market.pools))


def priced(market: Market, usd_h: float, spot_usd_h: float) -> Market:
    """Return a market whose pools without a price have these, in dollars per hour.

    Raises:   FleetError: a price is still missing.
    """
    spot = np.where(np.isnan(market.usd_h), spot_usd_h or math.nan, market.usd_h)
    pools = tuple(replace(pool, usd_h=pool.usd_h or usd_h) for pool in market.pools)
    for k, pool in enumerate(pools):
        if not pool.usd_h or np.isnan(spot[:, k]).any():
            which = "price on demand" if not pool.usd_h else "price of a preemptible machine"
            hint = "give prices ON_DEMAND,SPOT in dollars per hour of a machine"
            raise FleetError(f'pool "{pool.name}" has no {which}', hint=hint)
    return replace(market, pools=pools, usd_h=spot)


def noticed(market: Market, notice_s: float) -> Market:
    """Return a market whose pools without a notice have this one."""
    pools = tuple(replace(pool, notice_s=pool.notice_s or notice_s) for pool in market.pools)
    return replace(market, pools=pools)
