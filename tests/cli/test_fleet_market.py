"""penstock fleet market and replay: tables and documents of traces; what cannot be is refused."""

import json
import tomllib

import pytest

from tests.cli.conftest import MLP, Call

TRACE = "time_h,pool,machines,usd_h,on_demand_usd_h\n" + "".join(
    f"{hour},zone,{8 if hour % 5 < 3 else 2},1,3\n" for hour in range(60)
)
JOB = "steps = 36000\nstart_s = 100\nnotice_s = 60\n[speeds]\n8 = 1\n"


@pytest.fixture
def files(tmp_path):
    trace, job = tmp_path / "trace.csv", tmp_path / "job.toml"
    trace.write_text(TRACE)
    job.write_text(JOB)
    return trace, job


def test_market_shows_spells_and_prices(call: Call, files):
    done = call("fleet", "market", files[0], "--machines", 8, "--json")
    found = json.loads(done.out)
    (pool,) = found["pools"]
    assert found["hours"] == 60
    assert (pool["spells"], pool["share_up"]) == (12, 0.6)
    assert (pool["median_up_s"], pool["median_down_s"]) == (3 * 3600, 2 * 3600)
    shown = call("fleet", "market", files[0], "--machines", 8).out
    assert "60.0 %" in shown


def test_market_shows_laws_of_lifetimes(call: Call, tmp_path):
    path = tmp_path / "lives.csv"
    path.write_text("lifetime_s,ended_by\n" + "".join(f"{60 * k},preempted\n" for k in range(50)))
    done = call("fleet", "market", path, "--json")
    laws = [row["law"] for row in json.loads(done.out)["laws"]]
    assert laws[0] == "empirical"
    assert set(laws[1:]) == {"bathtub", "weibull", "exponential"}
    assert "after 1 h" in call("fleet", "market", path).out


def test_replay_shows_policies_beside_the_best(call: Call, files):
    trace, job = files
    asked = ("fleet", "replay", trace, "--job", job, "--deadline", 20, "--futures", 5)
    done = call(*asked, "--json")
    found = json.loads(done.out)
    names = [row["policy"] for row in found["policies"]]
    assert names == ["on_demand", "greedy", "uniform_progress", "look_ahead"]
    assert all(row["in_time"] == 1 for row in found["policies"])
    assert found["policies"][0]["usd"]["middle"] == pytest.approx(8 * 3 * (10 + 100 / 3600))
    assert call(*asked, "--json").out == done.out
    assert "look_ahead" in call(*asked).out


def test_replay_of_recorded_joins_and_losses_gives_length_and_steps(call: Call, tmp_path):
    """Two ranks at 2 steps/s; one is away from 100 to 150 s, a pause of 3 s each time: by hand."""
    trace, job = tmp_path / "trace.csv", tmp_path / "job.toml"
    trace.write_text("time_s,event,machine\n0,add,a\n0,add,b\n100,remove,b\n150,add,c\n")
    job.write_text(
        "steps = 500\nstart_s = 0\nreform_s = 3\nhas_copies = true\n[speeds]\n1 = 1.2\n2 = 2\n"
    )
    asked = ("--job", job, "--deadline", 1, "--policy", "transient", "--prices", "1,1", "--json")
    done = call("fleet", "replay", trace, *asked)
    (row,) = json.loads(done.out)["policies"]
    steps = 100 * 2 + 47 * 1.2
    assert row["hours"]["middle"] * 3600 == pytest.approx(150 + 3 + (500 - steps) / 2)
    assert (row["preemptions"], row["steps_lost"]) == (1, 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--policy", "clever"), "there is no policy 'clever'"),
        (("--policy", "anchored"), "policy 'anchored' has 0 numbers"),
        (("--policy", "growing,a,b"), "has what is no number"),
        (("--policy", "no_such_module:f"), "cannot find no_such_module:f"),
        (("--prices", "3"), "--prices is '3'"),
        (("--pool", "moon"), "has no pool 'moon'"),
        (("--policy", "gone.toml"), "cannot read policy gone.toml"),
    ],
)
def test_replay_refuses_what_cannot_be(call: Call, files, more, message):
    trace, job = files
    error, _ = call("fleet", "replay", trace, "--job", job, "--deadline", 20, *more).refusal(2)
    assert message in error


def test_replay_asks_for_prices_that_the_trace_lacks(call: Call, files, tmp_path):
    bare = tmp_path / "bare.csv"
    bare.write_text("time_s,machines\n0,4\n")
    error, hint = call("fleet", "replay", bare, "--job", files[1], "--deadline", 20).refusal(2)
    assert "no price on demand" in error
    assert "prices" in hint


def test_advice_is_written_as_a_policy_that_replay_takes(call: Call, files, tmp_path):
    trace, job = files
    policy, page = tmp_path / "policy.toml", tmp_path / "advice.html"
    asked = ("--trace", trace, "--deadline", "20h", "--budget", "400usd", "--futures", 4)
    done = call("fleet", "advise", job, *asked, "--policy-file", policy, "--report", page, "--json")
    found = json.loads(done.out)
    assert found["choice"]["in_time"] == 1
    assert found["reasons"][0].startswith("the cheapest of")
    assert tomllib.loads(policy.read_text())["policy"] == found["choice"]["policy"]
    assert len(tomllib.loads(policy.read_text())["hosts"]) in (0, 8)
    assert page.read_text().startswith("<!doctype html>")
    again = call(
        *("fleet", "replay", trace, "--job", job, "--deadline", 20, "--policy", policy),
        *("--report", page, "--json"),
    )
    (row,) = json.loads(again.out)["policies"]
    assert row["policy"] == found["choice"]["policy"]
    assert "A fleet replayed" in page.read_text()
    assert "none is cheaper and sooner" in call("fleet", "advise", job, *asked).out


def test_advice_of_a_script_takes_speeds_of_plans_for_more_hosts(call: Call, files, tmp_path):
    cluster = tmp_path / "cluster.toml"
    hosts = "".join(f'[[host]]\nname = "h{k}"\ndevice = "t"\nnum_devices = 1\n\n' for k in range(2))
    cluster.write_text(
        '[[device]]\nname = "t"\nmemory_bytes = 1000000000\nflop_per_s = { float32 = 1e9 }\n'
        "memory_bytes_per_s = 1e9\n\n" + hosts + "[inside]\nlatency_s = 1e-6\nbytes_per_s = 1e12\n"
        "[between]\nlatency_s = 1e-6\nbytes_per_s = 1e12\n"
    )
    asked = ("--trace", files[0], "--deadline", "5", "--futures", 2, "--json")
    more = ("--cluster", cluster, "--steps", 1000)
    found = json.loads(call("fleet", "advise", MLP, *asked, *more).out)
    assert found["choice"]["plan"].endswith("stages")
    assert any("pays less, since" in reason for reason in found["reasons"])
    run = tmp_path / "fleet.toml"
    run.write_text("steps = 9\nstart_s = 77.0\nspeeds = { 1 = 0.05, 2 = 0.1 }\n")
    slow = call("fleet", "advise", MLP, *asked, *more, "--measured", run)
    assert "start_s 77" in slow.err
    hours = (json.loads(one)["choice"]["hours_9_in_10"] for one in (slow.out, json.dumps(found)))
    assert next(hours) > 2.7 > next(hours)
    error, hint = call("fleet", "advise", MLP, *asked).refusal(2)
    assert "neither speeds nor steps" in error
    assert "--cluster" in hint
    error, _ = call("fleet", "advise", files[1], *asked, *more).refusal(2)
    assert "has its speeds" in error


def test_advice_refuses_what_is_no_number(call: Call, files):
    trace, job = files
    asked = ("fleet", "advise", job, "--trace", trace)
    error, hint = call(*asked, "--deadline", "soon").refusal(2)
    assert "--deadline is 'soon'" in error
    assert "20h" in hint
    assert "budget of -1" in call(*asked, "--deadline", 9, "--budget", "-1").refusal(2)[0]
