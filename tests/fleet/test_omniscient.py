"""Omniscient: no sequence of fleets is cheaper, and its schedule, replayed, costs what it says."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet import policies
from penstock.fleet.omniscient import Slots, fleets_of, gains_of, omniscient
from penstock.fleet.outcome import bound_of
from penstock.fleet.replay import Ruler, replay
from tests.fleet.markets import SLOT_S, SPOT, USD, plain_job, slotted

ups = st.lists(st.booleans(), min_size=3, max_size=6)


def cheapest_by_hand(up, prices, work):
    """Try every choice of (preemptible, on demand) in every slot."""
    best = math.inf
    for choice in itertools.product(((0, 0), (1, 0), (0, 1), (1, 1)), repeat=len(up)):
        if any(spot and not there for (spot, _), there in zip(choice, up, strict=True)):
            continue
        done, usd, before = 0, 0.0, (0, 0)
        for (spot, sure), price in zip(choice, prices, strict=True):
            if done < work:
                usd += (4 * spot * price + 4 * sure * USD) * SLOT_S / 3600
            done += (spot and before[0]) or (sure and before[1])
            before = spot, sure
        if done >= work:
            best = min(best, usd)
    return best


@given(ups, st.integers(1, 4), st.lists(st.integers(1, 5), min_size=6, max_size=6))
def test_no_sequence_of_fleets_is_cheaper(up, work, prices):
    prices = [float(price) for price in prices[: len(up)]]
    slots = Slots(
        SLOT_S,
        np.array(up, float)[:, None] * 4,
        np.array(prices)[:, None],
        np.array([USD]),
    )
    fleets = fleets_of(1, 4)
    found = omniscient(slots, fleets, gains_of(fleets, np.array([0, 0, 0, 0, 1])), work=work)
    assert np.isclose(found.usd, cheapest_by_hand(up, prices, work)) or (
        found.usd == math.inf == cheapest_by_hand(up, prices, work)
    )


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=6, max_size=20),
    st.integers(1, 6),
)
def test_schedule_of_the_best_replayed_costs_what_it_says(up, work):
    market, job = slotted(up), plain_job(work)
    deadline_s = len(up) * SLOT_S
    bound = bound_of(market, job, deadline_s=deadline_s)
    if bound.usd == math.inf:
        assert len(up) < work + 1
        return
    args = np.concatenate([[len(up)], bound.wanted.ravel()])
    ruler = Ruler("follow", policies.follow, (SLOT_S,), args)
    run = replay(market, job, ruler, deadline_s=deadline_s, tick_s=SLOT_S)
    assert run.hours * 3600 <= deadline_s + 1e-6
    assert np.isclose(run.usd, bound.usd)


def test_best_of_a_market_that_is_always_there_is_its_price():
    market = slotted([[True]] * 20)
    bound = bound_of(market, plain_job(10), deadline_s=20 * SLOT_S)
    assert np.isclose(bound.usd, 4 * 11 * SPOT * SLOT_S / 3600)  # a slot more than the work


def test_no_deadline_that_leaves_no_room_for_a_start_is_made():
    market = slotted([[True]] * 20)
    assert bound_of(market, plain_job(10), deadline_s=10 * SLOT_S).usd == math.inf
    assert bound_of(market, plain_job(10), deadline_s=11 * SLOT_S).usd < math.inf
