"""Replay: hours and dollars by hand for what can be worked out; the same with and without numba."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet import one_future, policies
from penstock.fleet.job_work import FleetJob, Speed, progress, read_job, young_daly_s
from penstock.fleet.look_ahead import expecting, look_ahead
from penstock.fleet.loss_rate import mean_life_s
from penstock.fleet.market import Market, MarketPool
from penstock.fleet.outcome import bound_of, judged
from penstock.fleet.replay import Ruler, replay, replay_all
from tests.fleet.markets import SLOT_S, SPOT, USD, plain_job, slotted

GREEDY = Ruler("greedy", policies.greedy)
ALL = Ruler("transient", policies.transient)


def changing(rows, *, notice_s=0.0):
    """Return a market of one pool from (time, machines, gone)."""
    times, machines, gone = (np.array(column, float) for column in zip(*rows, strict=True))
    prices = np.full((len(rows), 1), SPOT)
    pool = (MarketPool("zone", USD, notice_s),)
    return Market(pool, times, machines[:, None], prices, gone[:, None], times[-1] + 1.0)


def test_machines_on_demand_take_a_start_and_the_work():
    job = FleetJob(1000, (Speed(8, 2.0),), start_s=100, reform_s=3, restart_s=30)
    run = replay(changing([(0, 0, 0)]), job, Ruler("x", policies.on_demand), deadline_s=3600)
    assert run.hours * 3600 == pytest.approx(100 + 500)
    assert run.usd == pytest.approx(8 * USD * 600 / 3600)
    assert (run.usd_preemptible, run.preemptions) == (0, 0)
    assert run.useful == pytest.approx(500 / 600)


def test_loss_without_notice_goes_back_to_the_last_checkpoint():
    """Start 0 - 100; steps to 350, checkpoint 20; lost at 500: 130 steps again, after 30 s."""
    job = FleetJob(1000, (Speed(1, 1.0),), start_s=100, restart_s=30, checkpoint_s=20, every_s=250)
    market = changing([(0, 1, 0), (500, 0, 1), (600, 1, 0)])
    run = replay(market, job, ALL, deadline_s=9000)
    assert run.steps_lost == pytest.approx(130)
    # ordered at 600, useful at 700, loads for 30 s; 750 steps with two checkpoints of 20 s more
    assert run.hours * 3600 == pytest.approx(730 + 750 + 2 * 20)
    assert run.checkpoints == 3
    assert run.useful == pytest.approx(1000 / (run.machine_hours * 3600), abs=1e-3)


def test_notice_that_is_long_enough_loses_nothing():
    job = FleetJob(1000, (Speed(1, 1.0),), start_s=100, restart_s=30, checkpoint_s=20)
    market = changing([(0, 1, 0), (500, 0, 1), (600, 1, 0)], notice_s=20)
    run = replay(market, job, ALL, deadline_s=9000)
    assert (run.steps_lost, run.checkpoints) == (0, 0)
    assert run.hours * 3600 == pytest.approx(730 + 600)


def test_those_that_are_left_lose_only_the_step_under_way():
    """Two machines at 0.5 steps/s, one at 0.3: lost at 203, at step 51.5; pauses 2 s."""
    speeds = Speed(1, 0.3), Speed(2, 0.5)
    job = FleetJob(100, speeds, start_s=100, reform_s=2, checkpoint_s=9, has_copies=True)
    market = changing([(0, 2, 0), (203, 1, 1)])
    run = replay(market, job, ALL, deadline_s=9000)
    assert run.hours * 3600 == pytest.approx(203 + 2 + 49 / 0.3)
    assert (run.steps_lost, run.preemptions) == (0, 1)


def test_pool_that_loses_a_share_takes_that_share_of_what_is_held():
    job = FleetJob(1e6, (Speed(10, 1.0),), start_s=10, has_copies=True)
    market = changing([(0, 40, 0), (1000, 36, 4), (2000, 8, 28)])
    run = replay(market, job, ALL, deadline_s=5000, with_timeline=True)
    assert run.preemptions == 1 + max(round(10 * 28 / 36), 10 - 8)
    assert not run.is_done


def test_machines_last_as_long_as_they_are_given():
    job = FleetJob(300, (Speed(1, 1.0),), start_s=50, checkpoint_s=0.0, restart_s=0.0)
    lives = np.array([[100.0, 150.0, 1e9]])
    market = replace(changing([(0, 1, 0)], notice_s=1), lives_s=lives)
    run = replay(market, job, ALL, deadline_s=9000)
    assert run.preemptions == 2  # 50 steps, 100 steps, then the rest
    assert run.hours * 3600 == pytest.approx(100 + 150 + 50 + 150)


def test_timeline_ends_with_what_was_done():
    run = replay(slotted([[True]] * 9), plain_job(5), GREEDY, deadline_s=1e4, with_timeline=True)
    times, done = run.timeline[:, 0], run.timeline[:, 4]
    assert np.all(np.diff(times) > 0)
    assert np.all(np.diff(done) >= 0)
    assert run.timeline[-1, 1:4].tolist() == [4, 0, 4]


NAMES = {
    "on_demand": (),
    "greedy": (),
    "uniform_progress": (),
    "transient": (),
    "anchored": (1.0,),
    "auto_scaling": (0.1,),
    "growing": (1.0, 1.001),
    "bidding": (2.0, 1.5, 0.8),
}


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_policy_does_what_the_compiled_one_does(name):
    chance = random.Random(5)
    up = [[chance.random() < 0.6, chance.random() < 0.5] for _ in range(60)]
    price = np.array([[chance.uniform(0.5, 2), chance.uniform(0.5, 2)] for _ in up])
    market, job = slotted(up, spot=price), plain_job(20, reform_s=7.0, restart_s=11.0)
    compiled = getattr(policies, name)
    for deadline_s in (30 * SLOT_S, 50 * SLOT_S):
        found = [
            replay(market, job, Ruler(name, policy, NAMES[name]), deadline_s=deadline_s)
            for policy in (compiled, compiled.py_func)
        ]
        assert found[0].usd == found[1].usd
        assert found[0].hours == found[1].hours


def test_policy_of_a_user_is_a_plain_function():
    def two_of_each(view, pools, speed, args, wanted):
        wanted[:, 0] = 2.0

    market = slotted([[True, True]] * 30)
    run = replay(market, plain_job(5), Ruler("mine", two_of_each), deadline_s=1e5)
    assert run.usd == pytest.approx(4 * SPOT * 6 * SLOT_S / 3600)


@given(
    st.lists(st.booleans(), min_size=12, max_size=40),
    st.integers(3, 9),
    st.sampled_from(["greedy", "uniform_progress", "look_ahead"]),
)
def test_no_deadline_is_missed_that_can_be_made(up, work, name):
    market, job = slotted([[one] for one in up]), plain_job(work)
    deadline_s = max(work + 1, len(up) - 2) * SLOT_S
    ruler = Ruler(name, getattr(policies, name, None))
    if name == "look_ahead":
        ruler = look_ahead([market], job, deadline_s=deadline_s)
    run = replay(market, job, ruler, deadline_s=deadline_s, tick_s=SLOT_S)
    assert run.hours * 3600 <= deadline_s + 1e-6
    assert run.usd >= bound_of(market, job, deadline_s=deadline_s).usd - 1e-9


def test_looking_ahead_costs_less_than_greed():
    chance = random.Random(3)

    def future():
        up: list[bool] = []
        while len(up) < 80:
            up += [len(up) % 2 == 0 or chance.random() < 0.5] * chance.randint(2, 9)
        return slotted([[one] for one in up[:80]])

    job, deadline_s = plain_job(45), 60 * SLOT_S
    past, futures = [future() for _ in range(60)], [future() for _ in range(40)]
    ahead = look_ahead(past, job, deadline_s=deadline_s)
    found = judged(futures, job, [GREEDY, ahead], deadline_s=deadline_s)
    assert [row.missed for row in found.rows] == [0, 0]
    assert found.rows[1].cost_ratio < found.rows[0].cost_ratio
    assert 0 < found.rows[1].gap_closed < 1
    assert found.rows[1].cost_ratio >= 1


def test_futures_in_threads_are_those_one_by_one():
    markets = [slotted([[k % step == 0] for k in range(40)]) for step in (1, 2, 3, 5)]
    job = plain_job(6)
    found = replay_all(markets, job, lambda _: GREEDY, deadline_s=35 * SLOT_S)
    alone = [replay(market, job, GREEDY, deadline_s=35 * SLOT_S) for market in markets]
    assert [run.usd for run in found] == [run.usd for run in alone]


def test_checkpoints_by_young_and_daly_lose_least():
    """Waste C / I + I / (2 M), over a grid."""
    cost, life = 20.0, 5000.0
    grid = np.linspace(50, 3000, 5000)
    waste = cost / grid + grid / (2 * life)
    assert grid[np.argmin(waste)] == pytest.approx(young_daly_s(cost, life), rel=1e-2)
    assert young_daly_s(cost, math.inf) == math.inf


def test_mean_life_is_the_time_over_the_losses():
    market = changing([(0, 10, 0), (500, 8, 2), (999, 8, 0)])
    assert mean_life_s(market, 5) == pytest.approx(1000 / (5 * 2 / 10))


def test_more_batch_is_worth_less_than_it_costs():
    assert progress(64, 64, 500) == 1
    small, large = progress(128, 64, 1e9), progress(1e12, 64, 500)
    assert small == pytest.approx(2, rel=1e-6)
    assert large == pytest.approx(1 + 500 / 64, rel=1e-6)


def test_speed_between_two_plans_is_that_of_the_smaller():
    job = FleetJob(10, (Speed(2, 1.0, "a"), Speed(4, 1.8, "b")), machines=5)
    assert job.table().tolist() == [0, 0, 1, 1, 1.8, 1.8]
    assert [job.plan_of(k) for k in (1, 2, 3, 4, 9)] == ["", "a", "a", "b", "b"]


def test_job_is_read_from_toml(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("steps = 10\nstart_s = 5\n[speeds]\n8 = 2\n4 = 1.5\n")
    job = read_job(path)
    assert (job.steps, job.start_s, job.size, job.sizes) == (10, 5, 8, (4, 8))
    for text, why in {
        "steps = 0\n[speeds]\n8 = 1\n": "0 steps",
        "steps = 1\n": "without a speed",
        "steps = 1\n[speeds]\n8 = -1\n": "-1",
        "steps = 1\n[speeds]\nmany = 1\n": "many",
        "steps = 1\nstart = 3\n[speeds]\n8 = 1\n": "start",
        "steps = 1\nstart_s = -3\n[speeds]\n8 = 1\n": "start_s",
        "steps": "not TOML",
    }.items():
        path.write_text(text)
        with pytest.raises(FleetError, match=why):
            read_job(path)


def test_what_cannot_be_replayed_is_refused():
    market, job = slotted([[True]]), plain_job(1)
    with pytest.raises(FleetError, match="deadline"):
        replay(market, job, GREEDY, deadline_s=0)
    with pytest.raises(FleetError, match="no prices"):
        replay(slotted([[True]], spot=math.nan), job, GREEDY, deadline_s=9)
    with pytest.raises(FleetError, match="lasts"):
        replay(replace(market, lives_s=np.zeros((1, 3))), job, GREEDY, deadline_s=9)


def test_compiled_kernel_takes_compiled_policies_only_once_made():
    assert one_future.player() is one_future.player()
    assert expecting.py_func.__name__ == "expecting"
