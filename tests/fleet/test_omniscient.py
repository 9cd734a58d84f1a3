"""Omniscient: no sequence of fleets is cheaper, and its schedule, replayed, costs what it says."""

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet import policies
from penstock.fleet.omniscient import Slots, omniscient
from penstock.fleet.outcome import bound_of
from penstock.fleet.replay import Ruler, replay
from tests.fleet.markets import SLOT_S, SPOT, USD, plain_job, slotted


@st.composite
def futures(draw):
    """Draw slots of one pool: offered, the share taken as each begins, prices; machines, work."""
    count, machines = draw(st.integers(3, 6)), draw(st.integers(1, 3))
    rows = st.lists(st.integers(0, 5), min_size=count, max_size=count)
    shares = st.lists(st.sampled_from([0.0, 0.0, 0.25, 0.5, 1.0]), min_size=count, max_size=count)
    prices = st.lists(st.sampled_from([1.0, 1.0, 2.0, 5.0]), min_size=count, max_size=count)
    work = draw(st.integers(1, count - 1))
    return draw(rows), [0.0, *draw(shares)[1:]], draw(prices), machines, work


def slots_of(offered, taken, prices) -> Slots:
    columns = (np.array(each, float)[:, None] for each in (offered, prices))
    machines, usd_h = columns
    return Slots(SLOT_S, machines, usd_h, np.array([USD]), np.array(taken)[:, None])


def cheapest_by_hand(offered, taken, prices, machines, work):
    """Try every number of machines of both kinds in every slot; equal states once."""
    states = {(0, 0, 0): 0.0}
    for most, share, price in zip(offered, taken, prices, strict=True):
        after: dict[tuple[int, int, int], float] = {}
        for (spot, sure, done), usd in states.items():
            stay = min(spot - math.floor(spot * share + 1e-9), most)
            for now, beside in itertools.product(range(most + 1), range(machines + 1)):
                ready = min(stay, now) + min(sure, beside)
                key = now, beside, min(work, done + (ready >= machines))
                paid = usd + (done < work) * (now * price + beside * USD) * SLOT_S / 3600
                after[key] = min(paid, after.get(key, math.inf))
        states = after
    return min((usd for (_, _, done), usd in states.items() if done >= work), default=math.inf)


@given(futures())
def test_nobody_could_have_paid_less_than_the_least_and_the_omniscient_hardly_pays_more(case):
    offered, taken, prices, machines, work = case
    found = omniscient(slots_of(offered, taken, prices), machines=machines, work=work).usd
    least = cheapest_by_hand(*case)
    assert least * (1 - 1e-9) <= found <= 1.35 * least or found == least == math.inf


@given(
    st.lists(st.booleans(), min_size=3, max_size=6),
    st.integers(1, 4),
    st.lists(st.integers(1, 5), min_size=6, max_size=6),
)
def test_where_a_pool_has_enough_or_none_nothing_is_cheaper(up, work, prices):
    case = [2 * each for each in up], [0.0] * len(up), prices[: len(up)], 2, work
    found = omniscient(slots_of(*case[:3]), machines=2, work=work).usd
    assert np.isclose(found, cheapest_by_hand(*case)) or found == cheapest_by_hand(*case)


def test_on_average_the_omniscient_pays_a_hundredth_more_than_the_least():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(100):
        count, machines = int(rng.integers(3, 7)), int(rng.integers(1, 4))
        offered, work = rng.integers(0, 6, count).tolist(), int(rng.integers(1, count))
        taken = [0.0, *rng.choice([0.0, 0.0, 0.25, 0.5, 1.0], count - 1).tolist()]
        case = offered, taken, rng.choice([1.0, 1.0, 2.0], count).tolist(), machines, work
        found = omniscient(slots_of(*case[:3]), machines=machines, work=work).usd
        ratios.append(found / cheapest_by_hand(*case))
    assert np.mean(ratios) < 1.015


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
