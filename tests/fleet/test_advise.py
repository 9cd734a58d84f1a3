"""Advise: the front is what nothing beats, by brute force; the choice keeps what was asked for."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet.advise import advise
from penstock.fleet.choices import Aim, chosen_of, front_of
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.liveput import liveput_of
from penstock.fleet.look_ahead import look_ahead
from penstock.fleet.market import HOUR_S, only
from penstock.fleet.outcome import judged
from penstock.fleet.pictures import page_of_advice, page_of_replay
from penstock.fleet.policy_file import begun, read_policy
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.rulers import basis_of, ruler_of, table_of
from tests.fleet.markets import SLOT_S, plain_job, slotted

pairs = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(pairs)
def test_front_is_all_that_no_other_beats(figures):
    made = [SimpleNamespace(mean_usd=usd, late_h=hours) for usd, hours in figures]
    found = {(one.mean_usd, one.late_h) for one in front_of(made)}
    beaten = {
        (a, b) for a, b in figures for c, d in figures if c <= a and d <= b and (c, d) != (a, b)
    }
    assert found == set(figures) - beaten


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.5, 0.9, 0.96, 1.0])), min_size=1))
def test_choice_is_the_cheapest_that_is_sure_else_the_surest(figures):
    made = [
        SimpleNamespace(mean_usd=usd, late_h=1.0, in_time=sure, in_budget=1.0)
        for usd, sure in figures
    ]
    one = chosen_of(made, made)
    sure = [usd for usd, chance in figures if chance >= 0.95]
    if sure:
        assert (one.mean_usd, one.in_time >= 0.95) == (min(sure), True)
    else:
        assert one.in_time == max(chance for _, chance in figures)


@pytest.fixture(scope="module")
def market():
    up = [[k % 9 < 6, k % 13 < 9] for k in range(200)]
    return slotted(up, machines=4, spot=np.tile([1.0, 1.2], (200, 1)))


@pytest.fixture(scope="module")
def job():
    return FleetJob(
        30 * SLOT_S, (Speed(2, 0.6, "two"), Speed(4, 1.0, "four")), start_s=120, has_copies=True
    )


@pytest.fixture(scope="module")
def advice(market, job):
    return advise(market, job, Aim(5.0, 60.0), futures=10)


def test_advice_tries_policies_on_pools_with_plans(advice):
    tried = {(one.policy, one.pools, one.machines) for one in advice.tried}
    assert len(tried) == len(advice.tried)
    assert {one.machines for one in advice.tried} == {2, 4}
    assert {one.pools for one in advice.tried} == {
        ("zone0", "zone1"),
        ("zone0",),
        ("zone1",),
    }
    assert {one.plan for one in advice.tried} == {"two", "four"}
    assert advice.choice.in_time >= 0.95
    assert advice.choice.in_budget >= 0.95
    assert "cheapest" in advice.reasons[0]
    good = [one for one in advice.tried if min(one.in_time, one.in_budget) >= 0.95]
    assert advice.choice.mean_usd == min(one.mean_usd for one in good)


def test_a_run_that_follows_the_advice_is_fitted_as_the_advice_was(market, advice):
    fitted = [one for one in advice.tried if one.policy == "look_ahead"]
    for one in fitted:
        basis = basis_of(only(market, one.pools), 5.0 * HOUR_S)
        again = ruler_of(one.policy, one.job, basis, pytest.fail)
        assert table_of(again).tolist() == table_of(one.ruler).tolist()
    assert len(fitted) == len({(one.pools, one.machines) for one in advice.tried})


def test_advice_says_when_nothing_does(market, job):
    found = advise(market, job, Aim(0.5), futures=3)
    assert "no choice of" in found.reasons[0]
    with pytest.raises(FleetError, match="deadline of 0 h"):
        advise(market, job, Aim(0.0))


def test_advice_is_the_same_for_the_same_seed(market, job, advice):
    again = advise(market, job, Aim(5.0, 60.0), futures=10)
    assert [one.mean_usd for one in again.tried] == [one.mean_usd for one in advice.tried]
    assert again.reasons == advice.reasons


def test_hosts_are_those_that_the_choice_begins_with(market):
    job = plain_job(5)
    policy = look_ahead([market], job, deadline_s=30 * SLOT_S)
    run = replay(market, job, policy, deadline_s=30 * SLOT_S, with_timeline=True)
    assert begun(run) == tuple(f"preemptible-{rank}" for rank in range(4))


def test_policy_file_that_is_damaged_is_refused(tmp_path):
    path = tmp_path / "policy.toml"
    for text, why in {"policy = 3\n": "damaged", "policy": "not TOML"}.items():
        path.write_text(text)
        with pytest.raises(FleetError, match=why):
            read_policy(path)


def test_liveput_takes_the_smaller_plan_where_the_larger_is_always_lost():
    """Four machines are there every other slot of two minutes; two always.  A pause is 110 s."""
    flicker = slotted([[k % 2 == 0] for k in range(200)], machines=2, slot_s=120.0)
    always = np.full_like(flicker.machines, 2.0)
    market = type(flicker)(
        flicker.pools, flicker.times_s, flicker.machines + always, flicker.usd_h,
        flicker.gone, flicker.until_s,
    )  # fmt: skip
    speeds = Speed(2, 0.6), Speed(4, 1.0)
    for restart_s, best in ((110.0, 2.0), (0.0, 4.0)):
        job = FleetJob(1000, speeds, restart_s=restart_s)
        found = liveput_of([market], job)
        assert found.args[4] == best
        assert found.args[2:4] == (2.0, 2.0)
        assert found.args[:2] == (0.0, 0.0)


def test_page_of_an_advice_shows_front_choice_and_reasons(advice):
    page = page_of_advice(advice, 5.0, 60.0)
    assert advice.reasons[0] in str(page)
    for words in ("The front", "Choices", "steady pace", "deadline", *advice.reasons[1:]):
        assert words in page.html
    assert page.html.count("<figure>") == 5


def test_page_of_a_replay_shows_each_policy(market, job):
    from penstock.fleet import policies

    rulers = [Ruler("on_demand", policies.on_demand), Ruler("greedy", policies.greedy)]
    found = judged([market], job, rulers, deadline_s=6 * 3600)
    page = page_of_replay(market, job, found)
    assert page.html.count("machines over hours") >= 2
    assert "zone1" in page.html
    assert f"{found.rows[0].mean_usd:.2f}" in page.html
    assert math.isclose(found.deadline_h, 6)
