"""Running: a run that is asked at the moments of a replay wants what the replay has wanted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FleetError
from penstock.fleet import policies
from penstock.fleet.growing import GrowingTrace
from penstock.fleet.job_work import FleetJob, Speed
from penstock.fleet.look_ahead import look_ahead
from penstock.fleet.replay import Ruler, replay
from penstock.fleet.rulers import ruler_from, table_of
from penstock.fleet.running import RunAim, Standing, measured, so_far, to_come, wants
from penstock.fleet.traces import read_market
from tests.fleet.markets import SLOT_S, plain_job, slotted

MACHINES, SLOTS, TICK_S = 4, 30, 300.0
RULERS = (
    Ruler("on_demand", policies.on_demand),
    Ruler("greedy", policies.greedy),
    Ruler("uniform_progress", policies.uniform_progress),
    Ruler("transient", policies.transient),
    Ruler("anchored,1", policies.anchored, (1.0,)),
    Ruler("auto_scaling,0.1", policies.auto_scaling, (0.1,)),
)


def ordered(rows, job, market, ruler, aim):
    """Yield (now, wanted by a run, held in the replay), keeping orders as the kernel has them."""
    orders: list[tuple[int, float]] = []  # kind, ready
    for now, spot, sure, _, done, _, _ in rows:
        if market.machines[market.row_at(now), 0] == 0:
            orders = [each for each in orders if each[0] == 1]
        held, ready = np.zeros((1, 2)), np.zeros((1, 2))
        for kind, ready_s in orders:
            held[0, kind] += 1
            ready[0, kind] += ready_s <= now
        past = so_far([market], now, 0.0)
        wanted = wants(ruler, job, past, Standing(now, done, held, ready), aim)
        yield now, tuple(wanted[0]), (spot, sure)
        for kind in range(2):
            mine = [at for at, each in enumerate(orders) if each[0] == kind]
            for at in reversed(mine[int(wanted[0, kind]) :]):
                del orders[at]
            orders += [(kind, now + job.start_s)] * (int(wanted[0, kind]) - len(mine))


@given(st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS), st.sampled_from(RULERS))
def test_a_run_wants_what_the_replay_of_its_trace_wants(up, ruler):
    market, job = slotted(up), replace(plain_job(10, machines=MACHINES), has_copies=True)
    deadline_s = 16 * SLOT_S
    rows = replay(
        market, job, ruler, deadline_s=deadline_s, tick_s=TICK_S, with_timeline=True
    ).timeline
    made = [*ordered(rows.tolist(), job, market, ruler, RunAim(deadline_s, TICK_S))]
    assert len(made) > 10
    assert [wanted for _, wanted, _ in made] == [held for _, _, held in made]


def test_look_ahead_does_so_too_from_the_numbers_that_a_file_keeps():
    ups = [[(k // 5 + shift) % 2 for k in range(SLOTS)] for shift in (0, 1)]
    futures, job = [slotted(up) for up in ups], plain_job(10, machines=MACHINES, has_copies=True)
    fitted = look_ahead(futures, job, deadline_s=16 * SLOT_S)
    read_back = ruler_from("look_ahead", table_of(fitted))
    deadline_s = 16 * SLOT_S
    run = replay(futures[0], job, fitted, deadline_s=deadline_s, tick_s=TICK_S, with_timeline=True)
    about = job, futures[0], read_back, RunAim(deadline_s, TICK_S)
    made = [*ordered(run.timeline.tolist(), *about)]
    assert len({held for _, _, held in made}) > 2
    assert [wanted for _, wanted, _ in made] == [held for _, _, held in made]
    with pytest.raises(FleetError, match="no built-in"):
        ruler_from("mine:function", np.zeros(0))


def test_rows_of_the_future_are_not_looked_at(tmp_path):
    path = tmp_path / "zone.csv"
    path.write_text("time_s,machines,usd_h\n0,4,1\n100,2,1\n200,3,0.5\n")
    market = so_far([read_market(path)], 150.0, 1e9)
    assert market.machines.ravel().tolist() == [4, 2]
    assert market.begins_s == 0.0


def test_dates_are_on_the_runs_clock_and_history_stays(tmp_path):
    path = tmp_path / "zone.csv"
    path.write_text(
        "date,time,count\n2026-11-24,10:00:00,4\n2026-11-24,11:00:00,2\n2026-11-24,12:00:00,7\n"
    )
    begun_s = read_market(path).begins_s + 1800.0  # half past ten
    market = so_far([read_market(path)], 3600.0, begun_s)
    assert market.begins_s == pytest.approx(-1800.0)
    assert market.times_s.tolist() == [0.0, 3600.0]
    assert market.machines.ravel().tolist() == [4, 2]
    assert market.starts_s == pytest.approx(10 * 3600.0)


def test_a_pool_offers_nothing_before_its_first_row():
    one = slotted([1, 1, 0])
    late = replace(slotted([1]), pools=(replace(one.pools[0], name="late"),), begins_s=5.0)
    assert so_far([one, late], 4.0, 0.0).machines[-1].tolist() == [4, 0]
    assert so_far([one, late], 6.0, 0.0).machines[-1].tolist() == [4, 4]
    assert so_far([late], 1.0, 0.0).machines.tolist() == [[0]]


def test_lives_alone_do_not_tell_what_is_offered(tmp_path):
    path = tmp_path / "lives.csv"
    path.write_text(
        "lifetime_s,ended_by\n" + "".join(f"{60 * k},preempted\n" for k in range(1, 30))
    )
    with pytest.raises(FleetError, match="offered now"):
        so_far([read_market(path)], 1.0, 0.0)


def test_measured_speeds_move_those_that_were_not_measured():
    job = FleetJob(100, (Speed(1, 1.0, "one"), Speed(2, 2.0), Speed(4, 3.0)))
    found = measured(job, 50.0, {2: 1.0, 3: 1.2})
    speeds = {speed.machines: speed.steps_per_s for speed in found.speeds}
    assert speeds == pytest.approx({1: 0.5, 2: 1.0, 3: 1.2, 4: 1.5})
    assert (found.steps, found.size, found.speeds[0].plan) == (50.0, 4, "one")
    assert found.has_copies


def test_what_is_to_come_is_a_replay_of_what_is_left():
    job = plain_job(10, has_copies=True)
    stands = Standing(0.0, 4 * SLOT_S, np.array([[4.0, 0.0]]), np.array([[4.0, 0.0]]))
    market, aim = so_far([slotted([1, 1])], 0.0, 0.0), RunAim(20 * SLOT_S, TICK_S)
    found = to_come(RULERS[3], job, market, stands, aim)
    assert found.hours * 3600 == pytest.approx(6 * SLOT_S)  # all work already: no start
    assert found.usd == pytest.approx(4 * 1.0 * 6 * SLOT_S / 3600)
    starting = stands._replace(ready=np.zeros((1, 2)))
    assert to_come(RULERS[3], job, market, starting, aim).hours * 3600 == pytest.approx(7 * SLOT_S)


def test_rows_before_a_bad_one_hold_and_it_is_told_until_it_is_mended(tmp_path):
    path = tmp_path / "zone.csv"
    path.write_text("time_s,machines\n0,4\n")
    trace = GrowingTrace(path)
    assert trace.read().machines.ravel().tolist() == [4]
    with path.open("a") as file:
        file.write("10,2\n20,many\n30,1\n")
    assert trace.read().machines.ravel().tolist() == [4, 2]
    assert "row 4" in trace.problem
    assert GrowingTrace(path).read().machines.ravel().tolist() == [4, 2]
    path.write_text("time_s,machines\n0,4\n10,2\n20,3\n30,1")  # the last row is half-written
    assert trace.read().machines.ravel().tolist() == [4, 2, 3]
    assert trace.problem == ""
    path.unlink()
    assert trace.read().machines.ravel().tolist() == [4, 2, 3]
    path.write_text("time_s,machines\nnever,4\n")
    with pytest.raises(FleetError, match="row 2"):
        GrowingTrace(path).read()
