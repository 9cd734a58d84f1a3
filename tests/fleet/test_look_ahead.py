"""Look ahead: what is counted of a mixed fleet is what the kernel does; never late; cheap."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet import policies
from penstock.fleet.futures import in_slots, resampled
from penstock.fleet.look_ahead import (
    _HEAD,
    _PARTS,
    _WORDS,
    _fill_of,
    _held,
    _spares,
    expecting,
    look_ahead,
)
from penstock.fleet.market import Market, MarketPool
from penstock.fleet.outcome import bound_of, judged
from penstock.fleet.replay import Ruler, replay
from tests.fleet.markets import SLOT_S, SPOT, USD, plain_job

GREEDY = Ruler("greedy", policies.greedy)


def churning(rows, *, slot_s=SLOT_S) -> Market:
    """Return a market of one pool from (offered, taken as the slot begins), slot by slot."""
    offered, gone = (np.array(column, float)[:, None] for column in zip(*rows, strict=True))
    times = np.arange(len(rows)) * slot_s
    prices = np.full(offered.shape, SPOT)
    pool = (MarketPool("zone", USD, 60.0),)
    return Market(pool, times, offered, prices, gone, len(rows) * slot_s)


@st.composite
def churn(draw, least=4, most=24):
    """Draw slots that offer up to 9, of which some go though as many come."""
    count = draw(st.integers(least, most))
    offered = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    rows = [(offered[0], 0)]
    for before, now in pairwise(offered):
        rows.append((now, draw(st.integers(max(0, before - now), before))))
    return churning(rows)


def saying(pick: int) -> float:
    """Return the number of a table that says the same for eight states and all fleets held."""
    return float(sum(21 * pick << (6 * k) for k in range(8)))


def always(machines: int, spare: int, slots: int) -> Ruler:
    """Return the policy whose table always says: a mixed fleet."""
    head = np.zeros(_HEAD - 1)
    head[:4] = SLOT_S, 1, slots, spare
    table = np.full((slots + 1) * 2 * _WORDS, saying(1))
    return Ruler("always", expecting, (), np.concatenate([head, table]))


@settings(max_examples=40)
@given(churn(), st.integers(1, 6), st.integers(0, 4))
def test_what_is_counted_of_a_mixed_fleet_is_what_the_kernel_does(market, machines, spare):
    parts = in_slots(market, SLOT_S / _PARTS)
    found = _held(parts.machines, parts.gone, parts.usd_h, USD, machines, spare)
    count = len(market.times_s)
    job, ruler = plain_job(count, machines=machines), always(machines, spare, count)
    deadline_s = 9 * count * SLOT_S  # it is far, and so is the end of the work
    run = replay(market, job, ruler, deadline_s=deadline_s, tick_s=SLOT_S, with_timeline=True)
    for slots in (count, max(1, count // 2)):
        row = next(row for row in run.timeline if row[0] >= slots * SLOT_S - 1e-6)
        assert row[4] / SLOT_S == pytest.approx(found.works[:slots].sum())
        usd = (found.usd_h + found.fill_usd_h)[:slots].sum() * SLOT_S / 3600
        assert row[5] == pytest.approx(usd)


@settings(max_examples=25)
@given(st.lists(churn(least=12), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 6))
def test_no_deadline_is_missed_whatever_is_lost(markets, machines, work):
    """Also on markets that nothing was fitted on; as few slots as a start and a loss need."""
    job, deadline_s = plain_job(work, machines=machines), (work + 3) * SLOT_S
    ahead = look_ahead(markets[:1], job, deadline_s=deadline_s, slot_s=SLOT_S)
    for market in markets:
        run = replay(market, job, ahead, deadline_s=deadline_s, tick_s=SLOT_S)
        assert run.hours * 3600 <= deadline_s + 1e-6


def test_spare_machines_are_held_where_they_are_lost_one_by_one():
    """Of 12 one goes and one comes in every slot; 6 without any spare would never work."""
    market = churning([(12, 0), *[(12, 2)] * 59])
    job, deadline_s = plain_job(30, machines=6), 50 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s, slot_s=SLOT_S)
    assert ahead.table[3] > 0
    bound = bound_of(market, job, deadline_s=deadline_s).usd
    run = replay(market, job, ahead, deadline_s=deadline_s, tick_s=SLOT_S)
    greedy = replay(market, job, GREEDY, deadline_s=deadline_s, tick_s=SLOT_S)
    assert bound <= run.usd < 1.2 * bound
    assert greedy.usd > 1.5 * run.usd


def test_what_a_pool_does_not_offer_stands_beside_on_demand():
    """Five of six are always there: a mixed fleet costs 5 + 3 an hour, one on demand 18."""
    market = churning([(5, 0)] * 60)
    job, deadline_s = plain_job(30, machines=6), 34 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s, slot_s=SLOT_S)
    found = judged([market], job, [GREEDY, ahead], deadline_s=deadline_s, tick_s=SLOT_S)
    assert found.rows[1].cost_ratio == pytest.approx(1.0, abs=0.01)
    assert found.rows[1].usd.middle == pytest.approx(8 * 31 * SLOT_S / 3600, rel=0.01)
    assert found.rows[0].cost_ratio > 2


@given(st.floats(0.1, 30.0), st.integers(1, 6))
def test_deadline_need_not_be_a_number_of_slots(slots, machines):
    future = next(resampled(churning([(4, 0)] * 9), 1, seed=0, lasts_s=slots * SLOT_S))
    job, deadline_s = plain_job(5, machines=machines), slots * SLOT_S
    ahead = look_ahead([future], job, deadline_s=deadline_s, slot_s=SLOT_S)
    run = replay(future, job, ahead, deadline_s=deadline_s)
    assert run.hours * 3600 <= deadline_s + 1e-6 or slots < 8


def test_work_goes_on_while_machines_on_demand_take_over():
    """From ten slots on the table says: all on demand.  A start and twenty slots of work."""
    first = always(4, 0, 40)
    table = first.table.copy()
    table[_HEAD - 1 :].reshape(41, -1)[:31] = saying(2)
    market, job = churning([(4, 0)] * 40), plain_job(20)
    ruler = first._replace(table=table)
    run = replay(market, job, ruler, deadline_s=40 * SLOT_S, tick_s=SLOT_S, with_timeline=True)
    assert run.hours * 3600 == pytest.approx(21 * SLOT_S)
    assert {tuple(row[1:3]) for row in run.timeline} >= {(4.0, 0.0), (4.0, 4.0), (0.0, 4.0)}


def test_all_of_a_short_spell_is_used():
    """Machines for three slots of seven, and time enough: to wait for a longer spell is dear."""
    market = churning([(6, 0) if k % 7 < 3 else (0, 6 * (k % 7 == 3)) for k in range(140)])
    job, deadline_s = plain_job(30, machines=6), 130 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s, slot_s=SLOT_S)
    found = judged([market], job, [ahead], deadline_s=deadline_s, tick_s=SLOT_S)
    assert ahead.table[3] == 0
    assert found.rows[0].cost_ratio == pytest.approx(1.0, abs=0.02)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 200))
def test_machines_on_demand_fill_up_with_spare_ones_for_what_may_be_lost(machines, spare, spot):
    spot = min(spot, machines + spare)
    fill = _fill_of(spot, machines, spare)
    assert fill >= machines - spot
    assert (fill == machines) if spot == 0 else fill <= machines + spare
    assert fill == 0 or spot < machines + spare


def test_numbers_of_spare_machines_are_all_small_ones_and_fewer_large_ones():
    assert _spares(1) == [0, 1]
    assert _spares(10) == [0, 1, 2, 3, 4, 6, 8]
    assert _spares(24) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 24]
