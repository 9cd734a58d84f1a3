"""penstock train: the files of a run, going on from a checkpoint, and what ends it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.plan import Plan
from penstock.schedule import Schedule
from penstock.schedule.asynchronous import pipedream
from penstock.schedule.recipe import Recipe
from penstock.timeline import Timeline, breakdown_from_json
from tests.cli.conftest import Call, Done, little_room

JOBS = f"{Path(__file__).parent / 'training.py'}"
FILES = {
    "plan.json",
    "graph.json",
    "profile.json",
    "cluster.toml",
    "predicted.trace.json",
    "measured.trace.json",
    "metrics.jsonl",
    "audits.jsonl",
    "summary.json",
    "report.html",
    "checkpoints",
    "job.json",
    "alike.json",
}


def losses(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_training_without_a_plan_leaves_every_file_of_a_run(call: Call, tmp_path: Path) -> None:
    out = "--out", str(tmp_path / "run"), "--set", "audit=90%"  # however short it is
    done = call("train", f"{JOBS}:small", *out, "--json")
    assert done.code == 0, done.err
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == FILES
    summary = json.loads(done.out)
    assert summary == json.loads((folder / "summary.json").read_text())
    assert summary["answer"] == 42.0
    assert summary["options"] == {"audit": "90%"}
    assert "options.audit" in (folder / "report.html").read_text()
    assert summary["val_loss"] > 0
    assert summary["step_s_predicted"] > 0
    assert summary["step_s_measured"] > 0
    plan = Plan.load(folder / "plan.json")
    for name in ("peak_bytes_predicted", "peak_bytes_measured"):
        assert len(summary[name]) == plan.total_ranks
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["seconds"] > 0 and row["samples_per_second"] > 0 for row in rows)
    broken = breakdown_from_json(summary["breakdown"])
    audits = [json.loads(line) for line in (folder / "audits.jsonl").read_text().splitlines()]
    counted = {2, 3, 4} - {row["step"] for row in audits}  # less two of warm-up
    assert (broken.num_ranks, broken.num_steps) == (plan.total_ranks, len(counted))
    assert "predicted / measured" in done.err
    assert f"bottleneck: {summary['bottleneck']['evidence']}".split(": ")[1] in done.err
    assert "Where the wall time went" in (folder / "report.html").read_text()
    for name in ("predicted", "measured"):
        assert Timeline.load(folder / f"{name}.trace.json").num_ranks == plan.total_ranks


def test_earlier_run_in_the_folder_is_moved_aside(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for steps in (2, 3, 1):
        (folder / "mine.txt").parent.mkdir(exist_ok=True)
        (folder / "mine.txt").write_text("not of a run")
        done = call("train", f"{JOBS}:small", "--out", str(folder), "--steps", str(steps))
        assert done.code == 0, done.err
    assert "held an earlier run: it is kept in run.2" in done.err
    kept = [len(losses(tmp_path / name)) for name in ("run.1", "run.2", "run")]
    assert kept == [2, 3, 1]
    assert (tmp_path / "run.1" / "checkpoints" / "step-000002").is_dir()
    assert (folder / "mine.txt").exists()
    again = call(
        "train", f"{JOBS}:small", "--out", str(folder), "--plan", str(folder / "plan.json")
    )
    assert again.code == 0, again.err


@pytest.mark.parametrize("command", ["train", "check"])
@pytest.mark.sampled(2)
def test_what_a_job_prints_does_not_spoil_the_result(
    call: Call, tmp_path: Path, command: str
) -> None:
    fixed = ["--set", "stages=2", "--schedule", "one_f_one_b"]
    fixed += ["--ranks", "2", "--out", str(tmp_path / "run")] if command == "train" else []
    done = call(command, f"{JOBS}:chatty", *fixed, "--json")
    assert done.code == 0, done.err
    assert isinstance(json.loads(done.out), dict)
    assert "made" in done.err


def test_job_without_data_is_refused(call: Call, tmp_path: Path) -> None:
    done = call("train", f"{JOBS}:empty", "--out", str(tmp_path / "run"))
    refused(done, 2)
    assert "the job's data yields no micro-batch" in done.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, profiles: Path) -> list[float]:
    """Return the losses of a run on one rank."""
    folder = tmp_path_factory.mktemp("runs") / "alone"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(profiles))
        flags = ["--ranks", "1", "--schedule", "one_f_one_b"]
        assert main(["train", f"{JOBS}:small", "--out", str(folder), *flags]) == 0
    return losses(folder)


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b", "interleaved", "zb_h1"])
@pytest.mark.sampled(2)
def test_synchronous_schedules_give_the_same_losses(
    call: Call, tmp_path: Path, schedule: str, alone: list[float]
) -> None:
    stages = "4" if schedule == "interleaved" else "2"
    fixed = ["--schedule", schedule, "--ranks", "2", "--set", f"stages={stages}"]
    assert call("train", f"{JOBS}:small", "--out", str(tmp_path / "a"), *fixed).code == 0
    assert losses(tmp_path / "a") == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "double_buffered"])
@pytest.mark.sampled(2)
def test_resumed_run_goes_on_as_if_it_had_not_stopped(
    call: Call, tmp_path: Path, schedule: str
) -> None:
    fixed = ["--schedule", schedule, "--ranks", "2", "--set", "stages=2"]
    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    assert call("train", f"{JOBS}:small", "--out", whole, *fixed).code == 0
    same = "--steps", "2", "--plan", f"{whole}/plan.json"  # another search may divide otherwise
    assert call("train", f"{JOBS}:small", "--out", parts, *same).code == 0
    assert call("train", f"{JOBS}:small", "--out", parts, "--resume").code == 0
    assert losses(Path(parts)) == losses(Path(whole))
    again = call("train", f"{JOBS}:small", "--out", parts, "--resume")  # a script resumes it again
    assert (again.code, "nothing is left to do" in again.err) == (0, True)
    assert "train loss: " in again.out


def test_units_train_to_the_same_losses_and_are_gone_on_with(call: Call, tmp_path: Path) -> None:
    fixed = ["--schedule", "pipemare", "--ranks", "2", "--set", "stages=2", "--set", "check=false"]
    whole, parts, job = str(tmp_path / "whole"), str(tmp_path / "parts"), f"{JOBS}:small"
    assert call("train", job, "--out", whole, *fixed).code == 0
    done = call("train", job, "--out", parts, "--steps", "2", "--set", "units=block", *fixed)
    assert done.code == 0, done.err
    plan = Plan.load(tmp_path / "parts" / "plan.json")
    assert plan.num_stages > 2
    assert plan.predicted is not None
    assert call("train", job, "--out", parts, "--resume", "--set", "check=false").code == 0
    assert Plan.load(tmp_path / "parts" / "plan.json") == plan
    given = ["--plan", f"{whole}/plan.json", "--set", "units=2", "--set", "check=false"]
    assert call("train", job, "--out", str(tmp_path / "given"), *given).code == 0
    given_schedule = Plan.load(tmp_path / "given" / "plan.json").schedule
    assert replace(given_schedule, units=()) == Recipe("pipemare")
    assert max(given_schedule.units) == 2  # 1 where the seconds left a stage nothing to cut
    assert losses(tmp_path / "given") == losses(Path(whole))
    assert losses(Path(parts)) == pytest.approx(losses(Path(whole)), rel=1e-6)  # joined or not


def test_pipemare_begins_with_synchronous_steps(call: Call, tmp_path: Path) -> None:
    fixed = ["--schedule", "pipemare", "--ranks", "2", "--set", "stages=2"]
    done = call("train", f"{JOBS}:small", "--out", str(tmp_path / "a"), *fixed, "--steps", "9")
    assert done.code == 0, done.err
    flush = ["--schedule", "one_f_one_b", "--ranks", "2", "--set", "stages=2"]
    call("train", f"{JOBS}:small", "--out", str(tmp_path / "b"), *flush, "--steps", "9")
    synchronous = losses(tmp_path / "b")[:9]
    assert losses(tmp_path / "a")[:9] == pytest.approx(synchronous, rel=1e-6)  # joined or not


def test_model_that_cannot_be_traced_trains_as_eager_data_parallel(
    call: Call, tmp_path: Path
) -> None:
    done = call("train", f"{JOBS}:untraceable", "--out", str(tmp_path / "run"))
    assert done.code == 0, done.err
    assert "training.py" in done.err
    assert "if y.sum() > 0:" in done.err
    assert len(losses(tmp_path / "run")) == 5
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_loss"] > 0
    assert breakdown_from_json(summary["breakdown"]).of("B")[0] > 0
    assert summary["bottleneck"]["slowdown"] is None


def test_model_that_cannot_be_traced_is_refused_what_needs_a_plan(
    call: Call, tmp_path: Path
) -> None:
    fixed = ["--set", "offload=state", "--out", str(tmp_path / "run")]
    refused(call("train", f"{JOBS}:untraceable", *fixed), 2)


def test_slow_loader_is_named_on_the_terminal(call: Call, tmp_path: Path) -> None:
    flush = [
        "--schedule",
        "one_f_one_b",
        "--ranks",
        "2",
        "--set",
        "stages=2",
        "--set",
        "check=false",
    ]
    done = call("train", f"{JOBS}:dripping", "--out", str(tmp_path / "run"), *flush)
    assert done.code == 0, done.err
    assert "bottleneck: the loader, on rank " in done.err
    assert "hint: make `data` faster" in done.err
    assert "breakdown" not in done.out
    assert "bottleneck" not in done.out


def refused(done: Done, code: int) -> None:
    assert done.code == code, done.err
    lines = done.err.splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, done.err
    assert sum(line.startswith("hint: ") for line in lines) == 1, done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends", "ended at micro-batch"),
        ("odd_batch", "this batch holds"),
        ("killed", "was killed by signal 9"),
    ],
)
def test_failure_of_a_rank_ends_the_run_with_its_error(
    call: Call, tmp_path: Path, name: str, words: str
) -> None:
    fixed = [
        "--ranks",
        "2",
        "--set",
        "stages=2",
        "--schedule",
        "one_f_one_b",
        "--set",
        "check=false",
    ]
    done = call("train", f"{JOBS}:{name}", "--out", str(tmp_path / "run"), *fixed)
    refused(done, 1)
    assert words in done.err
    assert not list((tmp_path / "run").rglob(".step-*"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "checkpoint_every=sometimes"],
        ["--schedule", "one_f_one_bee"],
        ["--set", "stages=40"],
        ["--plan", "no-such-plan.json"],
        ["--ranks", "0"],
        ["--set", "units=many"],
        ["--set", "units=2", "--set", "eager=true"],
    ],
)
def test_bad_usage_is_told_and_leaves_nothing(
    call: Call, tmp_path: Path, arguments: list[str]
) -> None:
    out = tmp_path / "run"
    refused(call("train", f"{JOBS}:small", "--out", str(out), *arguments), 2)
    assert not out.exists() or not any(out.iterdir())


@pytest.mark.parametrize("command", ["train", "check"])
def test_what_a_plan_says_is_not_asked_for_beside_it(call: Call, command: str) -> None:
    done = call(command, f"{JOBS}:small", "--plan", "plan.json", "--set", "stages=2")
    error, hint = done.refusal(2)
    assert error == "a plan is given, and it already decides what stages asks for"
    assert hint == "leave out plan, or stages"


def test_plan_for_another_model_is_refused(call: Call, tmp_path: Path) -> None:
    fixed = ["--ranks", "2", "--set", "stages=2", "--steps", "1"]
    assert call("train", f"{JOBS}:small", "--out", str(tmp_path / "a"), *fixed).code == 0
    plan = str(tmp_path / "a" / "plan.json")
    done = call("train", f"{JOBS}:dropout", "--plan", plan, "--out", str(tmp_path / "b"))
    refused(done, 2)
    assert "the plan is for graph" in done.err


def test_damaged_checkpoint_is_refused_and_kept(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    fixed = ["--ranks", "2", "--set", "stages=2", "--schedule", "one_f_one_b"]
    assert call("train", f"{JOBS}:small", "--out", str(out), "--steps", "1", *fixed).code == 0
    (part, *_) = out.glob("checkpoints/*/rank-0.safetensors")
    part.write_bytes(part.read_bytes()[:100])
    refused(call("train", f"{JOBS}:small", "--out", str(out), "--resume"), 2)
    assert part.exists()


def test_the_newest_checkpoint_that_is_whole_is_gone_on_from(call: Call, tmp_path: Path) -> None:
    """What is damaged is told, by file and tensor, and kept under another name."""
    out = tmp_path / "run"
    command = ["train", f"{JOBS}:small", "--out", str(out), "--ranks", "1", "--set", "stages=1"]
    done = call(
        *command, "--steps", "4", "--set", "checkpoint_every=2", "--set", "keep=1,every=2,no-best"
    )
    assert done.code == 0, done.err
    checkpoints = out / "checkpoints"
    assert sorted(p.name for p in checkpoints.glob("step-*")) == ["step-000002", "step-000004"]
    part = checkpoints / "step-000004" / "rank-0.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    done = call(*command, "--resume")
    assert done.code == 0, done.err
    assert re.search(
        r"step-000004/rank-0.safetensors is damaged: the bytes of tensor \w+/", done.err
    )
    assert "going back to step-000002" in done.err
    assert "resuming after step 2" in done.err
    assert [p.name for p in checkpoints.glob("damaged-*")] == ["damaged-step-000004"]


def test_checkpoints_are_due_by_the_mean_time_between_failures(call: Call, tmp_path: Path) -> None:
    """Which the command gives, or the file of the machines; with what one costs in the run."""
    out, fixed = tmp_path / "run", ["--ranks", "1", "--set", "stages=1", "--steps", "40"]
    done = call("train", f"{JOBS}:small", "--out", str(out), *fixed, "--set", "mtbf=2h", "--json")
    assert done.code == 0, done.err
    assert "a checkpoint every sqrt(2 x what one costs x 120 min between failures)" in done.err
    told = json.loads(done.out)["checkpointing"]
    assert told["beside"] >= 1
    assert told["every_s"] == pytest.approx((2 * told["blocked_s"] * 7200) ** 0.5, rel=1e-6)
    assert "by failures" in done.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--set", "mtbf=2"], 'mtbf is "2", no time'),
        (
            ["--set", "mtbf=2h", "--set", "checkpoint_every=9"],
            "checkpoint_every is 9, and mtbf 2h",
        ),
        (["--set", "mtbf=2h", "--elastic"], "mtbf is 2h, and ranks that are lost"),
        (["--set", "keep=0"], "keep has 0 newest"),
        (["--set", "keep=3,all"], 'keep is "3,all"'),
        (["--set", "weights=nowhere.safetensors"], "there are no weights in nowhere.safetensors"),
    ],
)
def test_what_cannot_be_kept_or_begun_with_is_refused(
    call: Call, tmp_path: Path, flags: list[str], words: str
) -> None:
    done = call("train", f"{JOBS}:small", "--out", str(tmp_path / "run"), *flags)
    assert words in done.refusal(2)[0]


def test_full_disk_is_told_and_leaves_no_half_written_checkpoint(
    call: Call, tmp_path: Path
) -> None:
    wish = ["--out", str(tmp_path / "run"), "--ranks", "1", "--schedule", "one_f_one_b"]
    with little_room(60_000):
        done = call("train", f"{JOBS}:small", *wish)
    refused(done, 1)
    assert not list(tmp_path.rglob("step-*/state.json"))


ORDERS = (
    "0F0,0F1,,,0B0,0B1,0F2,0F3,,0B2,0B3\n,1F0,1F1,1B0,1B1,,1F2,1F3,1B2,1B3\n",
    "rank 0  F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3\n"
    "rank 1  F1.0 B1.0 F1.1 B1.1 F1.2 F1.3 B1.2 B1.3\n",
)


def test_schedule_of_a_file_is_trained_proved_for_itself_and_gone_on_with(
    call: Call, tmp_path: Path
) -> None:
    mine, folder = tmp_path / "mine.csv", tmp_path / "run"
    command = ["train", f"{JOBS}:dropout", "--out", str(folder)]
    mine.write_text(ORDERS[0])
    done = call(*command, "--ranks", "2", "--schedule", str(mine), "--steps", "2")
    assert done.code == 0, done.err
    plan = Plan.load(folder / "plan.json")
    assert (plan.schedule, plan.schedule.name) == (load(mine), "mine")
    mine.write_text(ORDERS[1])
    other = plan.changed(schedule=load(mine))  # of the same cuts, sizes and name
    for each, before in ((other, False), (plan, True)):
        each.save(tmp_path / "given.json")
        done = call(*command, "--plan", str(tmp_path / "given.json"), "--steps", "2")
        assert done.code == 0, done.err
        assert ("as was found before" in done.err) == before
    mine.unlink()
    done = call(*command, "--resume", "--steps", "3")
    assert done.code == 0, done.err
    assert Plan.load(folder / "plan.json").schedule == plan.schedule
    alone = call("train", f"{JOBS}:dropout", "--out", f"{folder}-1", "--ranks", "1", "--steps", "3")
    assert alone.code == 0, alone.err
    assert losses(folder) == pytest.approx(losses(tmp_path / "run-1"), rel=1e-5)


def load(path: Path) -> Schedule:
    return replace(Schedule.load(path), name=path.stem)


@pytest.mark.parametrize(
    ("orders", "flags", "message", "hint"),
    [
        (None, [], "there is no schedule file", "check the path"),
        ("rank 0  B0.0", [], "mine.txt: F0.0 is missing", "add F0.0"),
        ("rank 0  F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", [], "mine is of 3 micro-batches; a step", "4 mi"),
        (ORDERS[1], ["--ranks", "3"], "schedule mine (2 stages and 4 micro", "give --ranks 2"),
        (ORDERS[1], ["--set", "stages=3"], "ranks 2, stages 3, schedule mine", "it is of 2 stages"),
        (str(pipedream(2, 4)), [], "pipedream is written out for 4 steps", "name the builder"),
    ],
)
def test_schedule_file_that_cannot_be_trained_is_told(
    call: Call, tmp_path: Path, orders, flags, message, hint
) -> None:
    mine = tmp_path / "mine.txt"
    if orders is not None:
        mine.write_text(orders)
    ranks = [] if flags[:1] == ["--ranks"] else ["--ranks", "2"]
    for command in ("train", "plan"):
        done = call(command, f"{JOBS}:dropout", "--schedule", str(mine), *ranks, *flags)
        assert (done.code, done.err.count("error: ")) == (2, 1)
        assert message in done.err.split("error: ")[1]
        assert hint in done.err.split("hint: ")[1]
