"""Futures: pieces of the past put together, zones at once; lifetimes as textbooks have them."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet import read_market
from penstock.fleet.futures import by_laws, coming, fitted, in_slots, resampled, stretches
from penstock.fleet.lifetimes import (
    Lifetimes,
    by_hour,
    empirical,
    fits,
    kaplan_meier,
    read_lifetimes,
)
from penstock.fleet.spells import spells
from tests.fleet.markets import SLOT_S, slotted

DATA = Path(__file__).parents[2].parent / "shared" / "data"
# Weeks of remission of 21 patients on 6-MP: Freireich 1963, in every textbook on survival.
WEEKS = (6, 6, 6, 6, 7, 9, 10, 10, 11, 13, 16, 17, 19, 20, 22, 23, 25, 32, 32, 34, 35)
ENDED = (1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)


def test_kaplan_meier_is_the_textbooks_curve():
    times, share = kaplan_meier(Lifetimes(np.array(WEEKS, float), np.array(ENDED, float)))
    found = dict(zip(times.tolist(), share.round(3).tolist(), strict=True))
    known = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448}
    assert {week: found[week] for week in known} == known


@pytest.mark.parametrize("shape", [0.6, 1.0, 1.7])
def test_weibull_that_was_drawn_is_found_again(shape):
    random = np.random.default_rng(4)
    lives = 5000 * random.weibull(shape, 2000)
    cut = random.uniform(1000, 20000, 2000)
    seen = Lifetimes(np.minimum(lives, cut), (lives <= cut).astype(float))
    law = next(law for law in fits(seen) if law.name == "weibull")
    assert law.numbers == pytest.approx((shape, 5000), rel=0.07)
    mean = next(law for law in fits(seen) if law.name == "exponential").numbers[0]
    assert mean == pytest.approx(seen.seconds.sum() / seen.ended.sum())


def test_lives_drawn_from_a_law_survive_as_it_says():
    lives = Lifetimes(np.array(WEEKS, float) * 1000, np.array(ENDED, float))
    for law in (*fits(lives), empirical(lives)):
        drawn = law.sample(np.random.default_rng(1), 20_000)
        for at in (5000.0, 12000.0, 20000.0):
            share = float(law.survival(np.array([at]))[0])
            assert (drawn > at).mean() == pytest.approx(share, abs=0.02)


def test_bathtub_fits_lives_that_end_early_or_at_the_limit():
    random = np.random.default_rng(2)
    early = random.exponential(2000, 300)
    late = 86400 - random.exponential(3000, 300)
    ended = np.ones(900)
    ended[600:] = 0.0  # a third stays until the limit
    seconds = np.clip(np.concatenate([early, late, np.full(300, 86400.0)]), 1, 86400)
    laws = fits(Lifetimes(seconds, ended))
    assert laws[0].name == "bathtub"
    assert laws[0].numbers[1:3] == pytest.approx((2000, 3000), rel=0.15)
    assert laws[0].numbers[0] == pytest.approx(1 / 3, rel=0.1)


def test_public_lifetimes_are_bathtubs():
    path = DATA / "gcp-preemptions" / "preemptions_2019.csv"
    if not path.exists():
        pytest.skip("no ../shared/data: lifetimes of preemptible machines")
    (lives,) = read_lifetimes(path).values()
    assert (len(lives.seconds), lives.ended.sum()) == (1442, 717)
    within = lives.ended @ ((lives.seconds <= 3600) | (lives.seconds > 22 * 3600))
    assert within / 717 > 0.3
    assert [law.name for law in fits(lives)][-1] == "exponential"


def test_lifetimes_that_tell_nothing_are_refused(tmp_path):
    path = tmp_path / "lives.csv"
    path.write_text("lifetime_s,ended_by\n5,stop\n")
    with pytest.raises(FleetError, match="none was seen to end"):
        read_lifetimes(path)
    path.write_text("hours\n5\n")
    with pytest.raises(FleetError, match="no column lifetime_s"):
        read_lifetimes(path)


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=30),
    st.integers(0, 99),
)
def test_future_is_made_of_the_past_all_pools_at_once(up, seed):
    market = slotted(up)
    lasts_s = 7.3 * SLOT_S
    one, other = (
        next(resampled(market, 1, seed=seed, lasts_s=lasts_s, block_s=2.5 * SLOT_S))
        for _ in range(2)
    )
    assert (one.until_s, one.times_s[0]) == (lasts_s, 0)
    assert np.array_equal(one.machines, other.machines)
    assert np.array_equal(one.times_s, other.times_s)
    assert set(map(tuple, one.machines.tolist())) <= set(map(tuple, market.machines.tolist()))


@given(st.lists(st.booleans(), min_size=2, max_size=40), st.integers(0, 99))
def test_stretches_are_the_past_from_some_second_on(up, seed):
    market = slotted([[one] for one in up])
    lasts_s = 1.5 * market.until_s
    for future in stretches(market, 5, seed=seed, lasts_s=lasts_s):
        assert future.until_s == pytest.approx(lasts_s)
        changes = int((np.diff(np.array([*up, up[0]], int)) != 0).sum())
        found = int((np.diff(future.machines[:, 0]) != 0).sum())
        assert changes <= found + 1 <= 2 * changes + 2
        gone = np.maximum(0.0, -np.diff(future.machines, axis=0, prepend=future.machines[:1]))
        assert np.all(gone <= future.gone + 1e-9)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 99))
def test_what_comes_begins_as_it_is_now(up, seed):
    market = slotted([[one] for one in up])
    for future in coming(market, 8, seed=seed, lasts_s=9 * SLOT_S, machines=4):
        assert future.machines[0].tolist() == market.machines[-1].tolist()
        assert future.until_s == pytest.approx(9 * SLOT_S)


def test_what_has_lasted_for_a_day_goes_on_for_a_while():
    """Six days with machines, a day without, and no end of it seen."""
    market = slotted([[k < 6] for k in range(7)], slot_s=86400.0)
    futures = [*coming(market, 200, seed=0, lasts_s=4 * 86400.0, machines=4)]
    rests = np.array([future.times_s[1] if len(future.times_s) > 1 else 4e9 for future in futures])
    assert np.median(rests) == pytest.approx(86400 * math.log(2), rel=0.2)
    assert 0.2 < np.mean(rests > 86400) < 0.5


def test_spells_go_on_as_long_as_longer_ones_of_the_past_did():
    """Spells of ten slots with and two without; now one has lasted four: six to go, if not one."""
    up = [[k % 12 < 10] for k in range(12 * 30 + 4)]
    rests = [
        f.times_s[1] for f in coming(slotted(up), 310, seed=1, lasts_s=99 * SLOT_S, machines=4)
    ]
    six = np.isclose(rests, 6 * SLOT_S)
    assert six.mean() > 0.9


def test_futures_offer_on_average_what_the_past_did():
    market = slotted([[k % 7 < 3] for k in range(70)])
    futures = [*resampled(market, 300, seed=1, lasts_s=50 * SLOT_S)]
    share = np.mean([future.share_up(1)[0] for future in futures])
    assert share == pytest.approx(market.share_up(1)[0], abs=0.03)


def test_block_of_many_days_keeps_its_time_of_day():
    by_day = slotted([[k % 24 < 12] for k in range(24 * 5)], slot_s=3600.0)
    for future in resampled(by_day, 5, seed=3, lasts_s=86400.0):
        assert in_slots(future, 3600.0).machines[:, 0].tolist() == [4.0] * 12 + [0.0] * 12


def test_slots_hold_the_fewest_machines_and_the_mean_price():
    market = slotted([[True], [False], [True], [True]], spot=[[1], [2], [3], [5]])
    coarse = in_slots(market, 2 * SLOT_S)
    assert coarse.machines[:, 0].tolist() == [0, 4]
    assert coarse.usd_h[:, 0].tolist() == [1.5, 4]


def test_spells_are_those_that_were_made():
    market = slotted([[True], [True], [False], [True]])
    found = spells(market, 0, 4)
    assert found.up_s.tolist() == [2 * SLOT_S, SLOT_S]
    assert found.up_ended.tolist() == [1, 0]
    assert (found.down_s.tolist(), found.down_ended.tolist()) == ([SLOT_S], [1])


def test_spells_of_fitted_futures_last_as_those_of_the_past():
    random = np.random.default_rng(8)
    up: list[bool] = []
    for _ in range(200):
        up += [True] * max(1, int(random.exponential(10))) + [False] * 4
    market = slotted([[one] for one in up])
    laws = fitted(market, 4)
    futures = [*by_laws(market, laws, 40, seed=2, lasts_s=400 * SLOT_S, machines=4)]
    mean = np.mean([future.share_up(4)[0] for future in futures])
    assert mean == pytest.approx(market.share_up(4)[0], abs=0.05)
    with pytest.raises(FleetError, match="no whole spell"):
        fitted(slotted([[True]] * 5), 4)


def test_hours_with_more_losses_are_likelier():
    seconds = np.repeat(np.arange(24) * 3600.0, 50)
    assert by_hour(seconds, np.ones(len(seconds))) == pytest.approx(np.ones(24))
    at_noon = by_hour(np.full(1000, 12.5 * 3600), np.ones(1000))
    assert np.argmax(at_noon) == 12
    assert math.isclose(at_noon.mean(), 1)


def test_machines_of_a_file_of_lifetimes_die_as_it_says(tmp_path):
    path = tmp_path / "lives.csv"
    rows = "".join(f"{100 * k},preempted,{'ab'[k % 2]}\n" for k in range(1, 401))
    path.write_text("lifetime_s,ended_by,pool\n" + rows)
    market = read_market(path)
    assert market.names == ("a", "b")
    (future,) = resampled(market, 1, seed=1, lasts_s=1e5)
    assert future.lives_s.mean(axis=1) == pytest.approx([20000, 20000], rel=0.05)


def test_past_that_is_much_too_short_is_refused():
    short = slotted([[True], [True]], slot_s=1.0)
    assert len([*resampled(short, 1, seed=0, lasts_s=1000.0)]) == 1
    with pytest.raises(FleetError, match="a trace of 2 s is too short"):
        next(resampled(short, 1, seed=0, lasts_s=6 * 3600.0 * 2))
