"""Look ahead: never late, waits for what is cheap, holds spare machines, comes back from demand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet import policies
from penstock.fleet.futures import resampled
from penstock.fleet.look_ahead import _fill_of, _spares, expecting, look_ahead
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


def ruling(*, spare=0, reserve=0.0, while_s=0.0, prices=(1e9,)) -> Ruler:
    """Return the policy with these numbers."""
    return Ruler("x", expecting, (), np.array([spare, reserve, while_s, *prices], float))


@settings(max_examples=25)
@given(st.lists(churn(least=12), min_size=1, max_size=3), st.integers(1, 6), st.integers(1, 6))
def test_no_deadline_is_missed_whatever_is_lost(markets, machines, work):
    """Also on markets that nothing was fitted on; as few slots as a start and a loss need."""
    job, deadline_s = plain_job(work, machines=machines), (work + 3) * SLOT_S
    ahead = look_ahead(markets[:1], job, deadline_s=deadline_s)
    for market in markets:
        run = replay(market, job, ahead, deadline_s=deadline_s, tick_s=SLOT_S)
        assert run.hours * 3600 <= deadline_s + 1e-6


def test_spare_machines_are_held_where_they_are_lost_one_by_one():
    """Of 12 one goes and one comes in every slot; 6 without any spare would never work."""
    market = churning([(12, 0), *[(12, 2)] * 59])
    job, deadline_s = plain_job(30, machines=6), 50 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s)
    assert ahead.table[0] > 0
    bound = bound_of(market, job, deadline_s=deadline_s).usd
    run = replay(market, job, ahead, deadline_s=deadline_s, tick_s=SLOT_S)
    greedy = replay(market, job, GREEDY, deadline_s=deadline_s, tick_s=SLOT_S)
    assert bound <= run.usd < 1.2 * bound
    assert greedy.usd > 1.5 * run.usd


def test_what_a_pool_does_not_offer_stands_beside_on_demand():
    """Five of six are always there: a mixed fleet costs 5 + 3 an hour, one on demand 18."""
    market = churning([(5, 0)] * 60)
    job, deadline_s = plain_job(30, machines=6), 34 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s)
    found = judged([market], job, [GREEDY, ahead], deadline_s=deadline_s, tick_s=SLOT_S)
    assert found.rows[1].cost_ratio == pytest.approx(1.0, abs=0.01)
    assert found.rows[1].usd.middle == pytest.approx(8 * 31 * SLOT_S / 3600, rel=0.01)
    assert found.rows[0].cost_ratio > 2


@given(st.floats(0.1, 30.0), st.integers(1, 6))
def test_deadline_need_not_be_a_number_of_slots(slots, machines):
    future = next(resampled(churning([(4, 0)] * 9), 1, seed=0, lasts_s=slots * SLOT_S))
    job, deadline_s = plain_job(5, machines=machines), slots * SLOT_S
    ahead = look_ahead([future], job, deadline_s=deadline_s)
    run = replay(future, job, ahead, deadline_s=deadline_s)
    assert run.hours * 3600 <= deadline_s + 1e-6 or slots < 8


def test_work_goes_on_while_others_take_over():
    """Machines come when it is on demand already; they start beside those, which then go."""
    market = churning([(0, 0)] * 12 + [(4, 0)] * 40)
    job, deadline_s = plain_job(30), 36 * SLOT_S
    ruler = ruling(reserve=0.2)
    run = replay(market, job, ruler, deadline_s=deadline_s, tick_s=SLOT_S, with_timeline=True)
    held = [tuple(row[1:3]) for row in run.timeline]
    assert (0.0, 4.0) in held
    assert held.index((4.0, 4.0)) == held.index((0.0, 4.0)) + held.count((0.0, 4.0))
    assert run.timeline[-1, 1:3].tolist() == [4, 0]
    idle = [row for row in run.timeline if row[3] < 4 and row[4] > 0]
    assert not idle


def test_short_spells_are_waited_out_on_demand():
    market = churning([(0, 0)] * 9 + [(4, 0), (0, 4)] * 20)
    job, deadline_s = plain_job(30), 36 * SLOT_S
    at_once, later = (
        replay(market, job, ruling(reserve=0.3, while_s=while_s), deadline_s=deadline_s)
        for while_s in (0.0, 2 * SLOT_S)
    )
    assert (later.preemptions, later.usd_preemptible) == (0, 0)
    assert later.usd < at_once.usd


def test_reserve_is_what_losses_may_cost():
    """Machines go every tenth slot: whoever has waited to the last cannot come back."""
    up = [(0, 0)] * 20 + [(4, 0) if k % 10 else (0, 4) for k in range(1, 100)]
    market, job, deadline_s = churning(up), plain_job(60), 90 * SLOT_S
    none, some = (
        replay(market, job, ruling(reserve=share), deadline_s=deadline_s, tick_s=SLOT_S)
        for share in (0.0, 0.15)
    )
    assert some.usd < none.usd
    assert max(some.hours, none.hours) * 3600 <= deadline_s


def test_what_is_cheap_is_told_by_the_prices_of_the_past():
    """Two of four machines are there now, all of them later: worth waiting where that is likely."""
    market = churning([(2, 0)] * 20 + [(4, 0)] * 60)
    job, deadline_s = plain_job(20), 60 * SLOT_S
    dear, cheap = 2 * SPOT + 2 * USD, 4 * SPOT
    waits = ruling(prices=[cheap] * 20 + [dear] * 10)
    takes = ruling(prices=[cheap] * 2 + [dear] * 28)
    usd = [replay(market, job, r, deadline_s=deadline_s, tick_s=SLOT_S).usd for r in (waits, takes)]
    assert usd[0] == pytest.approx(21 * 4 * SPOT * SLOT_S / 3600, rel=0.05)
    assert usd[1] > 1.5 * usd[0]


def test_all_of_a_short_spell_is_used():
    """Machines for three slots of seven, and time enough: to wait for a longer spell is dear."""
    market = churning([(6, 0) if k % 7 < 3 else (0, 6 * (k % 7 == 3)) for k in range(140)])
    job, deadline_s = plain_job(30, machines=6), 130 * SLOT_S
    ahead = look_ahead([market], job, deadline_s=deadline_s)
    found = judged([market], job, [ahead], deadline_s=deadline_s, tick_s=SLOT_S)
    assert ahead.table[0] == 0
    assert found.rows[0].cost_ratio == pytest.approx(1.0, abs=0.02)


def test_what_is_held_stays_through_prices_that_are_hardly_dearer():
    """Every third slot offers a machine fewer: to give all back would cost a start each time."""
    market = churning([(4 - (k % 3 == 2), int(k % 3 == 2)) for k in range(60)])
    job, deadline_s = plain_job(20), 50 * SLOT_S
    cheap, next_ = 4 * SPOT, 3 * SPOT + USD
    ruler = ruling(prices=[cheap] * 16 + [next_] * 17)
    run = replay(market, job, ruler, deadline_s=deadline_s, tick_s=SLOT_S, with_timeline=True)
    assert run.timeline[:12, 1].min() >= 3


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
