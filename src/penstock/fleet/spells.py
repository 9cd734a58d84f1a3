"""Spells: how long enough machines were there, and how long they were not."""

import math
from typing import NamedTuple

import numpy as np

from penstock.fleet.market import HOUR_S, Floats, Market


class Spells(NamedTuple):
    """Lengths of the spells with and without enough machines, in seconds, in order of time.

    up_ended, down_ended   whether a spell was seen to end; the last one was not
    """

    up_s: Floats
    up_ended: Floats
    down_s: Floats
    down_ended: Floats


class PoolFigures(NamedTuple):
    """What a trace tells of a pool; nan where there is nothing to tell."""

    pool: str
    fewest: float
    most: float
    share_up: float
    spells: int
    median_up_s: float
    median_down_s: float
    lost_per_h: float
    least_usd_h: float
    most_usd_h: float


def spells(market: Market, pool: int, machines: int) -> Spells:
    """Return the spells in which a pool offers at least so many machines, or does not."""
    up = market.machines[:, pool] >= machines
    begins = np.flatnonzero(np.concatenate([[True], up[1:] != up[:-1]]))
    edges_s = np.append(market.times_s[begins], market.until_s)
    lasts_s, is_up = np.diff(edges_s), up[begins]
    ended = np.arange(len(begins)) < len(begins) - 1
    return Spells(
        lasts_s[is_up],
        ended[is_up].astype(np.float64),
        lasts_s[~is_up],
        ended[~is_up].astype(np.float64),
    )


def told(market: Market, pool: int, machines: int) -> PoolFigures:
    """Return the figures of one pool; spells are those with at least so many machines."""
    found, offered = spells(market, pool, machines), market.machines[:, pool]
    usd_h = market.usd_h[:, pool]
    known = usd_h[~np.isnan(usd_h)]
    return PoolFigures(
        market.pools[pool].name,
        float(offered.min()),
        float(offered.max()),
        float(market.share_up(machines)[pool]),
        len(found.up_s),
        _median(found.up_s),
        _median(found.down_s),
        float(market.gone[:, pool].sum()) / (market.until_s / HOUR_S),
        float(known.min()) if len(known) else math.nan,
        float(known.max()) if len(known) else math.nan,
    )


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan
