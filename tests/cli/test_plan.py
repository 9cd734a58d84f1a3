"""penstock plan and penstock simulate: from a job to a saved plan, and back to its timeline."""

import errno
import json
import logging
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.plan import spread
from penstock.cluster import Cluster
from penstock.graph.graph import Graph
from penstock.plan import Plan
from penstock.profile import Profile
from penstock.schedule.recipe import Recipe, name_of
from penstock.search import Candidate, front_of
from penstock.search.simplest import ERROR
from penstock.timeline import Timeline, peak_bytes
from penstock.training.saved import load_basis
from tests.cli.conftest import MLP, Call, little_room
from tests.search.chains import with_costs

JOB = f"{MLP}:job"
FILES = {"plan.json", "graph.json", "profile.json", "cluster.toml"}


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cluster of two ranks, so that no link has to be measured."""
    path = tmp_path_factory.mktemp("machines") / "two.toml"
    Cluster.here(2).save(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, profiles: Path, machines: Path) -> Path:
    """Return a folder with a plan of two stages, made by the command itself."""
    from penstock.cli import main

    folder = tmp_path_factory.mktemp("plans")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(profiles))
        plan = ["plan", JOB, "--cluster", str(machines), "--stages", "2", "--schedule", "gpipe"]
        assert main([*plan, "--out", str(folder / "plan.json")]) == 0
    return folder


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Return a copy of that folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def test_plan_is_written_with_all_that_it_was_made_with(folder: Path, machines: Path) -> None:
    assert {file.name for file in folder.iterdir()} == FILES
    plan = Plan.load(folder / "plan.json")
    assert (plan.num_stages, plan.num_ranks, name_of(plan.schedule)) == (2, 2, "gpipe")
    assert Graph.load(folder / "graph.json").digest == plan.graph
    assert Profile.load(folder / "profile.json").graph == plan.graph
    assert Cluster.load(folder / "cluster.toml") == Cluster.load(machines)


def test_plan_is_printed_with_the_reason_of_each_decision(call: Call, machines: Path) -> None:
    done = call("plan", JOB, "--cluster", machines, "--json")
    decisions = json.loads(done.out)["decisions"]
    text = call("plan", JOB, "--cluster", machines)
    assert (done.code, text.code) == (0, 0)
    assert {d["what"] for d in decisions} >= {"ranks", "stages", "cuts", "schedule", "recompute"}
    for decision in decisions:
        assert f"{decision['what']}: {decision['value']} " in text.out
        assert decision["why"]
    assert "predicted: " in text.out


def test_json_is_the_plan_that_is_written(call: Call, machines: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "plan.json"
    done = call("plan", JOB, "--cluster", machines, "--out", out, "--json")
    printed = json.loads(done.out)
    (tmp_path / "printed.json").write_text(done.out)
    assert Plan.load(tmp_path / "printed.json") == Plan.load(out)
    front, tally = printed.pop("front"), printed.pop("tally")
    assert printed == json.loads(out.read_text())
    step_s, fastest_s = printed["predicted"]["step_s"], front[0]["step_s"]
    assert fastest_s <= step_s <= (1 + ERROR) * fastest_s  # nothing is faster that is as simple
    if all(each["what"] != "simplest" for each in printed["decisions"]):
        assert step_s == fastest_s
    assert tally["simulated"] >= len(front)
    assert done.err.splitlines()[-1] == f"wrote {out}"


HEADING = r"No plan beats these in seconds and bytes(; \d+ more are within \d+ % of one of them)?:"


def test_front_and_what_became_of_all_plans_are_shown(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    text = call("plan", JOB, "--cluster", machines).out.splitlines()
    (start,) = [at for at, line in enumerate(text) if re.fullmatch(HEADING, line)]
    assert text[start + 1].split() == ["step", "peak", "plan"]
    rows = text[start + 2 : -1]
    assert 1 <= len(rows) <= 10
    assert all(re.search(r"  \w+: \d x \d+ stages on \d ranks", row) for row in rows)
    assert re.match(r"\d+ plans: \d+ simulated", text[-1])
    front = json.loads(call("plan", JOB, "--cluster", machines, "--json").out)["front"]
    assert [row["step_s"] for row in front] == sorted(row["step_s"] for row in front)
    peaks = [row["peak_bytes"] for row in front]
    assert peaks == sorted(peaks, reverse=True)
    for row in (front[0], front[-1]):  # each is a plan to train by
        (tmp_path / "row.json").write_text(json.dumps(row["plan"]))
        plan = Plan.load(tmp_path / "row.json")
        assert plan.predicted is not None
        assert (plan.predicted.step_s, max(plan.predicted.peak_bytes)) == (
            row["step_s"],
            row["peak_bytes"],
        )
        assert row["name"].startswith(
            f"{name_of(plan.schedule)}: {plan.replicas} x {plan.num_stages} "
        )


def front_row(step_s: float, peak: int, usd: float) -> Candidate:
    made = Plan.of(graph="0123", schedule="one_f_one_b", num_micro_batches=1, num_ranks=1)
    return Candidate(made, step_s, (peak,), usd)


@given(st.integers(1, 80), st.randoms(use_true_random=False))
def test_few_plans_stand_for_a_long_front(count: int, random: Random) -> None:
    rows = [[random.randint(1, 999) ** 2 for _ in range(3)] for _ in range(count)]
    front = front_of([front_row(a, b, c) for a, b, c in rows])
    shown, slack = spread(front)
    assert set(shown) <= set(front)
    assert len(shown) <= 10 or slack >= 10
    assert (slack == 1.0) == (len(front) <= 10)
    for k in range(3):
        values = [(each.step_s, each.peak_bytes[0], each.usd)[k] for each in front]
        assert min(values) in [(each.step_s, each.peak_bytes[0], each.usd)[k] for each in shown]
    for each in front:
        own = each.step_s, each.peak_bytes[0], each.usd
        near = [(o.step_s, o.peak_bytes[0], o.usd) for o in shown]
        assert any(all(b <= slack * a for a, b in zip(own, row, strict=True)) for row in near)


@pytest.mark.usefixtures("calls_cost_most")
def test_rows_of_joined_micro_batches_say_so(call: Call, machines: Path) -> None:
    done = call("plan", f"{MLP}:joins", "--cluster", machines, "--ranks", 1, "--json")
    front = json.loads(done.out)["front"]
    assert front[0]["plan"]["terms"]["joined"] == 2
    assert "2 micro-batches joined" in front[0]["name"]


def test_limit_is_shared_by_all_sizes_of_micro_batches(
    call: Call, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.choose import choose

    parts: list[float | None] = []
    monkeypatch.setattr(
        choose, "_over", lambda start, part_s: parts.append(part_s) or (lambda: True)
    )
    done = call("plan", f"{MLP}:joins", "--cluster", machines, "--limit", 1000, "--json")
    assert json.loads(done.out)["tally"]["simulated"] == 4  # one of each size
    assert parts[0] == 250.0  # of 1, of 2 joined, and in parts of two sizes
    assert parts[1] is not None
    assert 250.0 < parts[1] <= 1000.0 / 3


def test_search_stops_when_its_time_is_over(call: Call, machines: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = call("plan", JOB, "--cluster", machines, "--limit", 0, "--out", out)
    assert done.code == 0
    why = r"\d+ plans: 1 simulated; \d+ not tried for lack of time"
    assert re.search(rf"  search: stopped after 0 s \(user\): {why}\n", done.out)
    assert "No plan tried beats these in seconds and bytes:" in done.out
    assert call("simulate", out).code == 0
    refused = call("plan", JOB, "--cluster", machines, "--limit", -1)
    assert "limit" in refused.refusal(2)[0]


def test_plans_of_other_names_share_a_folder(call: Call, machines: Path, tmp_path: Path) -> None:
    for name, job in (("one", JOB), ("two", f"{MLP}:wider")):
        out = tmp_path / f"{name}.json"
        assert call("plan", job, "--cluster", machines, "--ranks", 1, "--out", out).code == 0
    for name in ("one", "two"):
        assert call("simulate", tmp_path / f"{name}.json").code == 0


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (("--ranks", 1), "total_ranks", 1),
        (("--replicas", 2), "replicas", 2),
        (("--stages", 2), "num_stages", 2),
        (("--schedule", "zb_h1"), "schedule", Recipe("zb_h1")),
        (("--schedule", "double_buffered"), "schedule", Recipe("double_buffered")),
        (("--schedule", "interleaved", "--stages", 4), "num_stages", 4),
        (("--schedule", "gpipe / units 2 1"), "schedule", Recipe("gpipe", units=(2, 1))),
    ],
)
@pytest.mark.sampled(2)
def test_wish_is_kept(
    call: Call, machines: Path, tmp_path: Path, flags: tuple[object, ...], name: str, value: object
) -> None:
    out = tmp_path / "plan.json"
    assert call("plan", JOB, "--cluster", machines, *flags, "--out", out).code == 0
    assert getattr(Plan.load(out), name) == value


def test_units_asked_for_are_at_most_so_many_of_each_stage(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    """A stage that can be cut nowhere is one unit: where the stages end, the search says."""
    out = tmp_path / "plan.json"
    asked = "--schedule", "gpipe", "--stages", 2, "--set", "units=2"
    assert call("plan", JOB, "--cluster", machines, *asked, "--out", out).code == 0
    schedule = Plan.load(out).schedule
    assert isinstance(schedule, Recipe)
    assert (schedule.builder, schedule.units) in [
        ("gpipe", each) for each in ((1, 2), (2, 1), (2, 2))
    ]


def test_no_other_objective_finds_a_better_plan_by_its_own_measure(
    call: Call, machines: Path
) -> None:
    found = {}
    for aim in ("time", "cost", "memory"):
        done = call("plan", JOB, "--cluster", machines, "--objective", aim, "--json")
        plan = json.loads(done.out)
        step_s, place = plan["predicted"]["step_s"], plan["place"]
        ranks = place["num_ranks"] * place["replicas"]
        peak = max(plan["predicted"]["peak_bytes"])
        found[aim] = {"time": step_s, "cost": step_s * ranks, "memory": peak}
    for objective, row in found.items():
        assert row[objective] == min(other[objective] for other in found.values())


def test_what_the_job_prints_does_not_reach_stdout(call: Call, machines: Path) -> None:
    done = call("plan", f"{MLP}:talks", "--cluster", machines, "--ranks", 1, "--json")
    assert done.code == 0
    json.loads(done.out)
    assert "this is for stdout" in done.err
    assert "and this" in done.err


def test_profile_is_measured_once_for_a_job_but_anew_for_another_optimizer(
    call: Call, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.profile import measure

    measured = []
    real = measure.measure

    def counted(*arguments: object, **more: object) -> Profile:
        measured.append(arguments)
        return real(*arguments, **more)

    monkeypatch.setattr(measure, "measure", counted)
    steps = 3  # of 1, 2 and 4 micro-batches joined
    for job, times in ((JOB, 0), (f"{MLP}:adam", steps), (f"{MLP}:adam", steps)):
        assert call("plan", job, "--cluster", machines, "--set", "tensor=1").code == 0
        assert len(measured) == times


@pytest.fixture
def calls_cost_most(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let profiles be those of a machine on which calling a stage takes far longer than its ops."""
    from penstock.profile import measure

    real = measure.measure

    def given(*arguments: Any, **more: Any) -> Profile:
        profile = real(*arguments, **more)
        ops = {"op_s": tuple(1e-9 * (s > 0) for s in profile.op_s), "accumulate_s_per_byte": 0.0}
        return with_costs(profile, call_s=1e-3, update_s=0.0, update_s_per_byte=0.0, **ops)

    monkeypatch.setattr(measure, "measure", given)
    assert call  # has named the folder that others share; these profiles are not for them
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("calls_cost_most")
def test_micro_batches_are_joined_where_that_is_faster_and_the_plan_says_so(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    job = f"{MLP}:joins"
    assert call("plan", job, "--cluster", machines, "--ranks", 1, "--out", out).code == 0
    plan = Plan.load(out)
    assert (plan.terms.joined, plan.num_micro_batches) == (2, 1)
    assert call("simulate", out).code == 0
    again = call("simulate", out, "--job", job, "--cluster", machines, "--json")
    assert plan.predicted is not None
    assert json.loads(again.out)["step_s"] > 0


def test_micro_batches_are_not_joined_where_memory_is_the_objective(
    call: Call, machines: Path
) -> None:
    fixed = "--cluster", machines, "--ranks", 1, "--objective", "memory"
    assert json.loads(call("plan", f"{MLP}:joins", *fixed, "--json").out)["terms"]["joined"] == 1


def test_joining_for_which_there_is_no_memory_is_refused_with_the_reason(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    fixed = "--ranks", 1, "--objective", "memory", "--json"
    found = json.loads(call("plan", f"{MLP}:joins", "--cluster", machines, *fixed).out)
    (least,) = found["predicted"]["peak_bytes"]
    cluster = Cluster.load(machines)
    small = replace(cluster, devices=(replace(cluster.devices[0], memory_bytes=least),))
    small.save(tmp_path / "small.toml")
    done = call("plan", f"{MLP}:joins", "--cluster", tmp_path / "small.toml", *fixed)
    (why,) = [d["why"] for d in json.loads(done.out)["decisions"] if d["what"] == "micro-batches"]
    pattern = r"every other size was refused: .* would hold \S+ \S+ of \S+ \S+, the least of \d+ .*"
    assert re.fullmatch(pattern, why)


# Machines that are not here

MIXED = Path(__file__).parents[2] / "examples" / "mixed.toml"


def test_devices_that_are_not_here_are_estimated_and_the_plan_says_so(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    done = call("plan", JOB, "--cluster", MIXED, "--schedule", "one_f_one_b", "--out", out)
    assert done.code == 0
    assert "seconds: a100 estimated, t4 estimated (only choice): a micro-batch: " in done.out
    assert "hosts: " in done.out
    assert "preemptible" in done.out
    here = call("plan", JOB, "--cluster", machines, "--ranks", 1)
    assert "seconds: cpu measured (only choice): a micro-batch: " in here.out
    kinds = [profile.kind for profile in load_basis(out, Plan.load(out)).profiles]
    assert kinds == ["a100", "t4"]


@pytest.mark.parametrize("objective", ["time", "cost"])
@pytest.mark.sampled(2)
def test_plan_for_unlike_machines_is_simulated_as_it_was_predicted(
    call: Call, tmp_path: Path, objective: str
) -> None:
    out = tmp_path / "plan.json"
    fixed = "--cluster", MIXED, "--objective", objective, "--stages", 2, "--schedule", "one_f_one_b"
    assert call("plan", JOB, *fixed, "--out", out).code == 0
    plan = Plan.load(out)
    done = call("simulate", out, "--json")
    assert plan.predicted is not None
    assert json.loads(done.out)["step_s"] == plan.predicted.step_s
    assert json.loads(done.out)["drained_s"] >= plan.predicted.step_s * (1 - 1e-9)
    names = [host.name for host in Cluster.load(tmp_path / "cluster.toml").hosts]
    assert names[: len(plan.place.hosts)] == list(plan.place.hosts)
    assert sorted(names) == ["big", "spot"]


def test_machine_that_is_here_is_measured_beside_one_that_is_not(
    call: Call, machines: Path, tmp_path: Path
) -> None:
    here, there = Cluster.load(machines), Cluster.load(MIXED)
    both = tmp_path / "both.toml"
    hosts = (*here.hosts, *there.hosts)
    replace(there, devices=(*here.devices, *there.devices), hosts=hosts).save(both)
    done = call("plan", JOB, "--cluster", both, "--schedule", "one_f_one_b")
    assert "seconds: cpu measured, a100 estimated, t4 estimated" in done.out


def test_device_without_the_rate_that_the_model_needs_is_refused(
    call: Call, tmp_path: Path
) -> None:
    slow = tmp_path / "slow.toml"
    slow.write_text(MIXED.read_text().replace("float32 = 8.1e12, ", ""))
    error, hint = call("plan", JOB, "--cluster", slow).refusal(2)
    assert error == 'device "t4" has no FLOP/s for float32; known: float16'
    assert hint == "add float32 to flop_per_s of the device"


def test_plan_measured_here_is_not_simulated_on_devices_that_it_has_no_seconds_of(
    call: Call, folder: Path
) -> None:
    error, hint = call("simulate", folder / "plan.json", "--cluster", MIXED).refusal(2)
    assert error == 'no profile is of device "a100"; there are profiles of cpu'
    assert "--job" in hint
    done = call("simulate", folder / "plan.json", "--cluster", MIXED, "--job", JOB, "--json")
    assert json.loads(done.out)["step_s"] > 0


# simulate


def test_simulated_plan_gives_what_was_predicted(call: Call, folder: Path) -> None:
    done = call("simulate", folder / "plan.json", "--json")
    document, plan = json.loads(done.out), Plan.load(folder / "plan.json")
    assert plan.predicted is not None
    assert document["step_s"] == plan.predicted.step_s
    assert tuple(document["peak_bytes"]) == plan.predicted.peak_bytes
    assert document["samples_per_second"] == pytest.approx(4 * 8 / plan.predicted.step_s)
    assert document["timeline"] is None
    assert len(document["busy_s"]) == 2
    assert (done.code, done.err) == (0, "")


def test_simulated_timeline_is_written_and_holds_the_plans_memory(
    call: Call, folder: Path, tmp_path: Path
) -> None:
    done = call("simulate", folder / "plan.json", "--out", tmp_path / "a" / "b", "--json")
    trace = tmp_path / "a" / "b" / "predicted.trace.json"
    document = json.loads(done.out)
    assert document["timeline"] == str(trace)
    assert list(peak_bytes(Timeline.load(trace))) == document["peak_bytes"]


def test_simulation_is_printed_with_picture_memory_and_step_time(call: Call, folder: Path) -> None:
    done = call("simulate", folder / "plan.json")
    lines = done.out.splitlines()
    named = [line for line in lines if re.match(r"rank \d  .*\b[FB]\d", line)]
    assert 1 <= len(named) <= 2  # the name of a short stage may find no room
    assert any(line.startswith("predicted: ") and "samples/s" in line for line in lines)
    assert "peak bytes" in done.out


def test_job_stands_in_for_what_is_missing_beside_a_plan(
    call: Call, copied: Path, machines: Path
) -> None:
    (copied / "graph.json").unlink()
    plan = copied / "plan.json"
    error, hint = call("simulate", plan).refusal(2)
    assert str(copied / "graph.json") in error
    assert "--job" in hint
    done = call("simulate", plan, "--job", JOB, "--cluster", machines, "--json")
    predicted = Plan.load(plan).predicted
    assert predicted is not None
    assert json.loads(done.out)["step_s"] == predicted.step_s


def test_other_machines_change_the_step(call: Call, folder: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.toml"
    text = (folder / "cluster.toml").read_text()
    latency = next(line for line in text.splitlines() if line.startswith("latency_s"))
    slow.write_text(text.replace(latency, "latency_s = 1.0"))
    done = call("simulate", folder / "plan.json", "--cluster", slow, "--json")
    assert json.loads(done.out)["step_s"] > 2


# Refusals


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("nowhere.py", "nowhere.py does not exist"),
        ("no.such.module:job", 'there is no module "no"'),
        (f"{MLP}:no_job", "returns the int 3, not a Job"),
        (f"{MLP}:value", "has no function, but a value value"),
        (f"{MLP}:jobb", "has no function jobb"),
        (f"{MLP}:raises", "KeyError: 'weights'"),
        (":", '":" names no job'),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train", "check"])
def test_job_that_is_none_is_refused(
    call: Call, tmp_path: Path, command: str, job: str, words: str
) -> None:
    out = () if command == "check" else ("--out", tmp_path / "out" / "plan.json")
    error, _ = call(command, job, *out).refusal(2)
    assert words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("empty", "yields no micro-batch"),
        ("loss_raises", f"the job's model or loss fails at {MLP}:"),
    ],
)
def test_job_that_cannot_be_traced_is_refused(call: Call, name: str, words: str) -> None:
    error, _ = call("plan", f"{MLP}:{name}").refusal(2)
    assert words in error


def test_model_that_raises_is_blamed_with_its_line(call: Call) -> None:
    error, _ = call("plan", f"{MLP}:model_raises").refusal(1)
    line = 1 + MLP.read_text().splitlines().index('        raise OverflowError("no such width")')
    assert error == f"{MLP}:{line}: OverflowError: no such width"


@pytest.mark.parametrize("command", ["plan", "check"])
def test_more_stages_than_cut_points_are_refused_with_both_numbers(
    call: Call, command: str
) -> None:
    error, hint = call(command, JOB, "--stages", 9).refusal(2)
    assert error == "9 stages need 8 cut points; the model has 4"
    assert hint == "use at most 5 stages"


@pytest.mark.parametrize("command", ["plan", "check"])
def test_unknown_schedule_is_refused_before_anything_is_traced(call: Call, command: str) -> None:
    error, hint = call(command, JOB, "--schedule", "zb_h9").refusal(2)
    assert error == "there is no schedule 'zb_h9'"
    assert "zb_h1" in hint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--objective", "beauty"), "'beauty'"),
        (("--ranks", 3), "3 ranks of a cluster of 2"),
        (("--replicas", 3), "no plan fits"),
        (("--cluster", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_wish_that_cannot_be_is_refused(
    call: Call, machines: Path, flags: tuple[object, ...], words: str
) -> None:
    error, _ = call("plan", JOB, "--cluster", machines, *flags).refusal(2)
    assert words in error


def test_damaged_cluster_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[[host]\n")
    error, _ = call("plan", JOB, "--cluster", tmp_path / "c.toml").refusal(2)
    assert str(tmp_path / "c.toml") in error


def test_plan_that_does_not_exist_is_refused(call: Call, tmp_path: Path) -> None:
    error, _ = call("simulate", tmp_path / "plan.json").refusal(2)
    assert error == f"cannot read plan {tmp_path / 'plan.json'}: No such file or directory"


@pytest.mark.parametrize("command", ["simulate", "train", "check"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_truncated_plan_is_refused_and_left_as_it_is(
    call: Call, copied: Path, command: str, share: float
) -> None:
    whole = (copied / "plan.json").read_bytes()
    part = whole[: int(share * len(whole))]
    (copied / "plan.json").write_bytes(part)
    arguments = (
        (copied / "plan.json",) if command == "simulate" else (JOB, "--plan", copied / "plan.json")
    )
    out = () if command == "check" else ("--out", copied / "out")
    error, _ = call(command, *arguments, *out).refusal(2)
    assert str(copied / "plan.json") in error
    assert (copied / "plan.json").read_bytes() == part


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("penstock", "graph"),
        ("stages", None),
        ("stages[0].cut", None),
        ("stages[0].cut", "one"),
        ("stages[0].cut", 99),
        ("stages[0].cut", 1.5),
        ("stages[0].name", "other"),
        ("stages[0].recompute", 1),
        ("stages[1].name", "other"),
        ("stages[1].far", "away"),
        ("schedule", 5),
        ("schedule", "zb_h9"),
        ("place.num_micro_batches", 0),
        ("place.num_micro_batches", 1.5),
        ("place.num_micro_batches", "4"),
        ("place.num_ranks", 3),
        ("place.replicas", 2),
        ("place.shares", [2, 2]),
        ("terms", None),
        ("terms.joined", 0.5),
        ("overlap.early", -1),
        ("agreement.more", 1),
        ("decisions", [1]),
        ("predicted", {"step_s": 1.0}),
        ("predicted", {"step_s": "x", "peak_bytes": [1, 2], "usd": 0.0}),
        ("more", 1),
        ("graph", "0123456789abcdef"),
    ],
)
def test_plan_with_a_wrong_value_is_refused(
    call: Call, copied: Path, key: str, value: object
) -> None:
    plan = copied / "plan.json"
    content = json.loads(plan.read_text())
    *outer, name = re.findall(r"\w+", key)
    inner = content
    for place in outer:
        inner = inner[int(place) if place.isdigit() else place]
    inner[name] = value
    plan.write_text(json.dumps(content))
    call("simulate", plan).refusal(2)


def test_plan_for_another_model_is_refused_with_both_digests(
    call: Call, folder: Path, machines: Path
) -> None:
    plan = folder / "plan.json"
    other = "--job", f"{MLP}:wider", "--cluster", machines
    error, hint = call("simulate", plan, *other).refusal(2)
    assert f"the plan is for graph {Plan.load(plan).graph}; this job traces to graph " in error
    assert "new plan" in hint


def test_files_of_another_plan_are_refused(call: Call, copied: Path, machines: Path) -> None:
    kept = (copied / "plan.json").read_bytes()
    other = call("plan", f"{MLP}:wider", "--cluster", machines, "--out", copied / "plan.json")
    assert other.code == 0
    (copied / "plan.json").write_bytes(kept)
    error, hint = call("simulate", copied / "plan.json").refusal(2)
    assert "is of another plan" in error
    assert "--job" in hint


@pytest.mark.parametrize("name", sorted(FILES - {"plan.json"}))
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"nodes": 3}'])
def test_damaged_file_beside_a_plan_is_refused_by_name(
    call: Call, copied: Path, name: str, content: bytes
) -> None:
    (copied / name).write_bytes(content)
    error, _ = call("simulate", copied / "plan.json").refusal(2)
    assert name in error


def test_plan_for_more_ranks_than_the_cluster_has_is_refused(
    call: Call, folder: Path, tmp_path: Path
) -> None:
    Cluster.here(1).save(tmp_path / "one.toml")
    found = call("simulate", folder / "plan.json", "--cluster", tmp_path / "one.toml")
    error, _ = found.refusal(2)
    assert error == "the plan is for 2 ranks, the cluster has 1"


def test_basis_of_a_plan_is_what_was_saved(folder: Path) -> None:
    basis = load_basis(folder / "plan.json", Plan.load(folder / "plan.json"))
    assert basis.cluster == Cluster.load(folder / "cluster.toml")


# No room, no permission


@pytest.mark.usefixtures("folder")  # by which all machine code is there
def test_plan_that_finds_no_room_leaves_nothing(call: Call, tmp_path: Path, machines: Path) -> None:
    fixed = "--cluster", machines, "--ranks", 1, "--out", tmp_path / "plan.json"
    with little_room(4000):
        done = call("plan", JOB, *fixed)
    error, _ = done.refusal(1)
    assert error == f"{tmp_path / 'graph.json'}: File too large"
    assert list(tmp_path.iterdir()) == []


def test_plan_without_room_for_its_last_file_leaves_no_new_ones(
    call: Call, tmp_path: Path, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(plan: Plan, path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Plan, "save", full)
    (tmp_path / "graph.json").write_text("older")
    fixed = "--cluster", machines, "--out", tmp_path / "plan.json"
    error, hint = call("plan", JOB, *fixed).refusal(1)
    assert error == f"{tmp_path / 'plan.json'}: No space left on device"
    assert "space" in hint
    assert [file.name for file in tmp_path.iterdir()] == ["graph.json"]


def test_simulation_that_finds_no_room_leaves_nothing(
    call: Call, tmp_path: Path, folder: Path
) -> None:
    with little_room(4000):
        done = call("simulate", folder / "plan.json", "--out", tmp_path)
    error, _ = done.refusal(1)
    assert error == f"{tmp_path / 'predicted.trace.json'}: File too large"
    assert list(tmp_path.iterdir()) == []


def test_folder_without_permission_is_refused_at_once(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    error, hint = call("plan", JOB, "--out", tmp_path / "plan.json").refusal(1)
    assert error == f"{tmp_path}: Permission denied"
    assert hint == "choose a place where you can write"


@pytest.mark.parametrize("name", ["plan", "simulate"])
def test_place_that_is_no_folder_is_refused_at_once(
    call: Call, name: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = (JOB,) if name == "plan" else (folder / "plan.json",)
    error, _ = call(name, *given, "--out", tmp_path / "file" / "out").refusal(1)
    assert "Not a directory" in error


def test_cache_that_cannot_be_written_is_only_a_message(
    call: Call, tmp_path: Path, machines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    done = call("plan", JOB, "--cluster", machines, "--ranks", 1, "--json")
    assert done.code == 0
    json.loads(done.out)
    assert "could not be kept" in done.err
