"""Losses: what is lost at once, one by one, and how often a checkpoint follows from it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet import policies
from penstock.fleet.job_work import FleetJob, Speed, young_daly_s
from penstock.fleet.loss_rate import every_s_of, mean_life_s, mean_whole_life_s, saving
from penstock.fleet.market import Market, MarketPool
from penstock.fleet.replay import Ruler, replay

HOUR_S = 3600.0
GREEDY, SURE = Ruler("greedy", policies.greedy), Ruler("on_demand", policies.on_demand)


def changing(rows, *, notice_s=0.0, until_s=None):
    """Return a market of one pool from (time, machines), of which all that are fewer are gone."""
    times, machines = (np.array(column, float) for column in zip(*rows, strict=True))
    gone = np.maximum(0.0, -np.diff(machines, prepend=machines[0]))
    pool = (MarketPool("zone", 3.0, notice_s),)
    until_s = times[-1] + 1.0 if until_s is None else until_s
    ones = np.ones((len(rows), 1))
    return Market(pool, times, machines[:, None], ones, gone[:, None], until_s)


def test_machines_of_a_pool_that_go_together_are_one_loss_of_all_copies():
    """Two machines, together 1 step/s: both go after two hours, for half an hour."""
    job = FleetJob(36000, (Speed(1, 0.5), Speed(2, 1.0)), start_s=60, has_copies=True)
    market = changing([(0, 2), (7200, 0), (9000, 2)])
    run = replay(market, job, GREEDY, deadline_s=12 * HOUR_S)
    assert run.checkpoints > 0
    assert run.steps_lost < 1800
    assert run.hours <= 12
    assert run.usd < 24


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9))
def test_all_are_lost_where_no_more_are_left_than_none(machines, offered, left):
    market = changing([(0, offered), (500, min(left, offered))], until_s=1000.0)
    whole, some = (
        mean_whole_life_s(market, machines, 60.0), mean_life_s(market, machines),
    )  # fmt: skip
    assert some <= whole
    if left == 0:
        assert whole == some == 1000
    if left >= offered:
        assert whole == math.inf


def test_losses_at_once_are_one_loss():
    together = changing([(0, 8), (500, 4), (900, 8)], until_s=1000.0)
    assert mean_life_s(together, 8) == 1000


def test_machines_that_die_one_by_one_leave_copies():
    market = replace(changing([(0, 9)]), lives_s=np.full((1, 4), 36000.0))
    assert mean_life_s(market, 4) == pytest.approx(9000)
    assert mean_whole_life_s(market, 1, 60.0) == pytest.approx(36000)
    assert mean_whole_life_s(market, 4, 60.0) > 1e9


def test_a_notice_shorter_than_a_checkpoint_is_none():
    job = FleetJob(1000, (Speed(1, 1.0),), checkpoint_s=20)
    rows = [(0, 1), (500, 0), (600, 1)]
    for has_copies in (False, True):
        copied = replace(job, has_copies=has_copies)
        short, enough = changing(rows, notice_s=19), changing(rows, notice_s=20)
        assert every_s_of(short, copied, HOUR_S) == pytest.approx(young_daly_s(20, 601))
        assert every_s_of(enough, copied, HOUR_S) == math.inf


def test_what_was_never_lost_yet_may_be_lost():
    job = FleetJob(1000, (Speed(1, 1.0),), checkpoint_s=10)
    calm = changing([(0, 1)], until_s=1e6)
    assert every_s_of(calm, job, HOUR_S) == math.inf
    assert saving(job, calm, HOUR_S).every_s == pytest.approx(young_daly_s(10, 1e6))


def test_checkpoints_that_cost_nothing_are_no_events():
    """Each step is safe as soon as it is done, whatever is lost."""
    job = FleetJob(10**6, (Speed(1, 1.0),), start_s=60, checkpoint_s=0)
    market = changing([(3600 * k, 1 - k % 2) for k in range(600)])
    run = replay(market, job, GREEDY, deadline_s=700 * HOUR_S, with_timeline=True)
    assert (run.checkpoints, run.steps_lost) == (0, pytest.approx(0, abs=1.0 * run.preemptions))
    assert len(run.timeline) < 20_000
    assert every_s_of(market, replace(job, checkpoint_s=1e-9), 700 * HOUR_S) > 1.0
    with pytest.raises(FleetError, match="every_s is"):
        replay(market, replace(job, every_s=1e-3), GREEDY, deadline_s=700 * HOUR_S)


@given(st.floats(0, 60), st.floats(0, 30), st.booleans(), st.floats(60, 7000))
def test_pauses_of_checkpoints_make_no_policy_late(checkpoint_s, reform_s, has_copies, lost_s):
    """Ten hours of work in twelve on one machine, which is lost for ever at some time."""
    job = FleetJob(
        36000, (Speed(1, 1.0),), start_s=60, checkpoint_s=checkpoint_s, reform_s=reform_s,
        every_s=600.0, has_copies=has_copies,
    )  # fmt: skip
    market = changing([(0, 1), (lost_s, 0), (12 * HOUR_S, 0)])
    for ruler in (GREEDY, Ruler("up", policies.uniform_progress)):
        run = replay(market, job, ruler, deadline_s=12 * HOUR_S)
        assert run.hours <= 12


NONSENSE = {
    "steps": 1e308,
    "start_s": 1e300,
    "restart_s": math.inf,
    "batch": 1e200,
    "machines": 10**6,
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_numbers_are_refused(name):
    given = {"steps": 100.0, "speeds": (Speed(1, 1.0),), name: NONSENSE[name]}
    with pytest.raises(FleetError):
        FleetJob(**given)
    with pytest.raises(FleetError, match="steps/s"):
        Speed(1, 1e-300)


@pytest.mark.parametrize("deadline_s", [0.0, math.inf, math.nan, 1e15])
def test_deadlines_that_cannot_be_are_refused(deadline_s):
    with pytest.raises(FleetError, match="deadline"):
        replay(changing([(0, 1)]), FleetJob(9, (Speed(1, 1.0),)), SURE, deadline_s=deadline_s)
