"""penstock replay: the path and the answers of a run's folder, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.stores.store_use import StoreUse
from penstock.timeline import step_s
from penstock.training.read_store import in_summary
from tests.cli.conftest import Call
from tests.graph.tiny import GRAPH
from tests.search.chains import with_costs
from tests.simulate.fake_run import fake_run, plain
from tests.simulate.strategies import one_host
from tests.simulate.test_what_if import PROFILE

PLAN = plan_by_hand(GRAPH, (0,), "one_f_one_b", num_micro_batches=4)
MEASURED = fake_run(lower_plan(PLAN, GRAPH), plain(0))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a folder as `penstock train` leaves it."""
    folder = tmp_path / "run"
    folder.mkdir()
    PLAN.save(folder / "plan.json")
    GRAPH.save(folder / "graph.json")
    PROFILE.save(folder / "profile.json")
    device = DeviceKind("d", 2**30, (), 1.0)
    Cluster((device,), (Host("h", "d", 2),), Link(0.0, 1e9)).save(folder / "cluster.toml")
    MEASURED.save(folder / "measured.trace.json")
    return folder


def test_path_and_usual_answers_are_told_best_first(call: Call, run: Path) -> None:
    done = call("replay", run)
    assert (done.code, done.err) == (0, "")
    assert "replayed: " in done.out
    assert "(+0.0 %)" in done.out
    ratios = [
        float(line.split("  ")[-2 if "profile" in line or "sums" in line else -1])
        for line in done.out.partition("what if")[2].splitlines()[1:]
        if "left out" not in line
    ]
    assert len(ratios) > 10
    assert ratios == sorted(ratios)
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_what_a_store_would_be_read_otherwise_is_told(call: Call, run: Path) -> None:
    use = StoreUse("s3://bucket", 0.03, 1e8, 4, 10**7, 32, 100_000, 0.08)
    (run / "summary.json").write_text(json.dumps(in_summary(use)))
    told = call("replay", run).out.partition("what if, of the store")[2].splitlines()
    assert [line.split("  ")[0] for line in told[1:4]] == [
        "nothing else",
        "8 requests at a time",
        "both of these",
    ]
    first, second, *_ = json.loads(call("replay", run, "--json").out)["store"]
    assert (first["wait_s"], first["step_s"]) == (use.wait_s, use.wait_s + 0.08)
    assert second["wait_s"] == pytest.approx(32 * 0.031 / 8 - 0.08)
    idle = replace(use, compute_s=9.0)  # nothing waits
    (run / "summary.json").write_text(json.dumps(in_summary(idle)))
    assert json.loads(call("replay", run, "--json").out)["store"] == []


def test_json_has_the_figures_of_the_text(call: Call, run: Path) -> None:
    document = json.loads(call("replay", run, "--json").out)
    assert document["measured_s"] == pytest.approx(step_s(MEASURED))
    assert document["replayed_s"] == pytest.approx(step_s(MEASURED))
    assert document["steps"] == 1
    assert sum(part["share"] for part in document["critical_path"]) == pytest.approx(1.0)
    named = {row["what_if"]: row for row in document["what_if"]}
    assert named["free links"]["ratio"] <= 1.0
    assert named["zb_h1"]["rests_on"] == ["I and W as the profile divides B"]


def test_schedules_that_are_one_here_share_a_line(call: Call, run: Path) -> None:
    rows = call("replay", run).out.partition("what if")[2].splitlines()
    shared = [row for row in rows if "dapple" in row]
    assert len(shared) == 1
    assert "dapple, interleaved" in shared[0]


def test_questions_are_answered_one_by_one_and_together(call: Call, run: Path) -> None:
    flags = ["--faster-rank", "0=2", "--faster-rank", "1=2", "--faster-stage", "0=0.5"]
    flags += ["--faster-kind", "F=2", "--faster-link", "inf", "--latency", "0.5"]
    flags += ["--micro-batches", "8", "--schedule", "gpipe"]
    done = call("replay", run, *flags, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["what_if"]
    assert [row["what_if"] for row in rows] == [
        "gpipe",
        "rank 0 2 times faster",
        "rank 1 2 times faster",
        "stage 0 0.5 times faster",
        "F 2 times faster",
        "free links",
        "messages 500 ms longer under way",
        "8 micro-batches",
        "all of these together",
    ]


def test_several_schedules_are_not_put_together(call: Call, run: Path) -> None:
    done = call("replay", run, "--schedule", "gpipe", "--schedule", "zb_h1", "--json")
    rows = json.loads(done.out)["what_if"]
    assert [row["what_if"] for row in rows] == ["gpipe", "zb_h1"]


def test_links_of_another_cluster_are_read_from_its_file(
    call: Call, run: Path, tmp_path: Path
) -> None:
    one_host(2, Link(2.0, 1e9)).save(tmp_path / "slow.toml")
    done = call("replay", run, "--cluster", tmp_path / "slow.toml", "--json")
    (row,) = json.loads(done.out)["what_if"]
    assert row["what_if"] == "links of another cluster"
    assert row["ratio"] > 1.5


def test_more_micro_batches_say_what_the_ratio_is_of(call: Call, run: Path) -> None:
    done = call("replay", run, "--micro-batches", 8)
    assert "of seconds per micro-batch" in done.err
    assert "8 micro-batches" in done.out


def test_schedule_that_does_not_fit_the_memory_is_left_out(call: Call, run: Path) -> None:
    done = call("replay", run)
    assert "left out: " not in done.out
    small = with_costs(PROFILE, state_bytes_per_byte=1e12)
    small.save(run / "profile.json")
    done = call("replay", run)
    assert done.code == 0
    assert "left out: gpipe: rank 0 would hold" in done.out


# -- what is refused


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--faster-rank", "0"], "--faster-rank is '0'"),
        (["--faster-rank", "a=2"], "--faster-rank is 'a=2'"),
        (["--faster-stage", "0=fast"], "--faster-stage is '0=fast'"),
        (["--faster-kind", "X=2"], "--faster-kind is 'X=2'"),
        (["--faster-kind", "F=0"], "0 times faster cannot be"),
        (["--faster-link", "-1"], "-1 times faster cannot be"),
        (["--latency", "-1"], "messages cannot be under way -1 s longer"),
        (["--faster-rank", "5=2"], "there is no rank 5"),
        (["--schedule", "zb"], "there is no schedule 'zb'"),
        (["--schedule", "forward_only"], "forward_only has no backward pass"),
        (["--cluster", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_question_that_cannot_be_asked_is_refused(
    call: Call, run: Path, flags: list[str], said: str
) -> None:
    error, _ = call("replay", run, *flags).refusal(2)
    assert said in error


def test_folder_without_a_run_is_refused(call: Call, tmp_path: Path) -> None:
    error, hint = call("replay", tmp_path / "nowhere").refusal(2)
    assert error == f"there is no folder {tmp_path / 'nowhere'}"
    assert "penstock train" in hint
    error, _ = call("replay", tmp_path).refusal(2)
    assert error == f"{tmp_path} holds no measured.trace.json"


def test_run_without_a_plan_is_refused(call: Call, run: Path) -> None:
    (run / "plan.json").unlink()
    error, hint = call("replay", run).refusal(2)
    assert error == f"{run} holds no plan.json"
    assert "cannot be traced" in hint


def test_trace_of_another_plan_is_refused(call: Call, run: Path) -> None:
    PLAN.changed(num_micro_batches=5).save(run / "plan.json")
    error, _ = call("replay", run).refusal(2)
    assert error.endswith(
        "does not belong to the plan beside it: rank 0 of the timeline lacks F0.4"
    )


@pytest.mark.parametrize("name", ["measured.trace.json", "plan.json", "graph.json", "cluster.toml"])
def test_damaged_file_is_refused_by_name(call: Call, run: Path, name: str) -> None:
    (run / name).write_bytes(b"{")
    error, _ = call("replay", run).refusal(2)
    assert name in error


def test_a_schedule_is_found_for_the_seconds_of_a_run(call: Call, run: Path) -> None:
    asked = ("schedule", "--find", "exact", "--seconds", run, "--within", 1)
    document = json.loads(call(*asked, "--json").out)
    assert (document["stages"], document["micro_batches"], document["limit"]) == (2, 4, 2)
    assert document["step_s"] <= step_s(MEASURED)
    assert document["run_s"] >= document["step_s"]
    done = call(*asked, "--stages", 3)
    assert (done.code, "is a run of 2 stages, not of 3" in done.err) == (2, True)
    done = call("schedule", "--find", "anneal", "--seconds", run)
    assert (done.code, "something that is not a number" in done.err) == (2, True)
