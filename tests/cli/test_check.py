"""penstock check: what it compares, what it says, and its exit code."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call

JOBS = f"{Path(__file__).parent / 'training.py'}"
KEYS = {"ok", "traced", "stages", "schedule", "replicas", "steps", "bitwise"}
KEYS |= {"max_relative_difference", "why", "not compared"}


@pytest.mark.parametrize(
    "schedule", ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "double_buffered"]
)
@pytest.mark.sampled(2)
def test_every_schedule_equals_the_plain_step(call: Call, schedule: str) -> None:
    done = call("check", f"{JOBS}:dropout", "--stages", "4", "--schedule", schedule, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() == KEYS
    assert (found["ok"], found["traced"]) == (True, True)
    assert (found["stages"], found["schedule"]) == (4, schedule)
    assert found["max_relative_difference"] < 1e-6
    late = schedule == "double_buffered"
    assert found["steps"] == ([1] if late else [1, 5])
    assert ("SGD with momentum" in found["not compared"]) == late


def test_replicas_and_more_steps_are_compared(call: Call) -> None:
    done = call("check", f"{JOBS}:dropout", "--replicas", "2", "--steps", "3", "--json")
    found = json.loads(done.out)
    assert (found["ok"], found["replicas"], found["steps"]) == (True, 2, [1, 5])
    assert "copies equal" in found["why"]
    assert "update equal" in found["why"]


def test_plan_that_joins_micro_batches_is_compared_as_it_is_run(call: Call, tmp_path: Path) -> None:
    from penstock.choose.prepare import joined_step
    from penstock.graph.trace import capture
    from penstock.listener import SILENT
    from penstock.plan import plan_by_hand
    from tests.cli import training

    job = training.small()
    for slices in ((), (("0.0.bias", 2), ("0.0.weight", 2))):
        _, captured = joined_step(job, capture(job), 2, slices, SILENT)
        made = plan_by_hand(captured.graph, [0], "gpipe", num_micro_batches=2, num_ranks=2)
        made = made.changed(joined=2, buffers=job.buffers)
        made.save(tmp_path / "plan.json")
        done = call("check", f"{JOBS}:small", "--plan", tmp_path / "plan.json", "--json")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert (found["ok"], found["stages"]) == (True, 2)


def test_units_are_compared(call: Call) -> None:
    flags = ["--set", "units=block", "--schedule", "zb_h1", "--json"]
    found = json.loads(call("check", f"{JOBS}:dropout", *flags).out)
    assert (found["ok"], found["bitwise"]) == (True, True)
    assert found["stages"] > 2
    assert found["schedule"].startswith("zb_h1 / units ")


def test_messages_that_the_job_packs_are_compared_with_a_loop_that_rounds(call: Call) -> None:
    found = json.loads(call("check", f"{JOBS}:packed", "--schedule", "zb_h1", "--json").out)
    assert (found["ok"], found["bitwise"]) == (True, True)
    assert "rounding" in found["why"]
    assert found["max_relative_difference"] == 0.0


def test_updates_before_the_norm_is_known_are_compared(call: Call) -> None:
    flags = ["--schedule", "zb_h2", "--set", "post_validation=true", "--json"]
    found = json.loads(call("check", f"{JOBS}:dropout", *flags).out)
    assert (found["ok"], found["bitwise"]) == (True, True)


@pytest.mark.parametrize(
    ("job", "flags", "words"),
    [
        ("unclipped", [], "post_validation, and Job.clip_norm is None"),
        ("dropout", ["--schedule", "pipedream"], "pipedream does not update at a step's end"),
    ],
)
@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_post_validation_where_nothing_is_validated_is_refused(
    call: Call, command: str, job: str, flags: list[str], words: str, tmp_path: Path
) -> None:
    out = ["--out", str(tmp_path / "out")] if command == "train" else []
    done = call(command, f"{JOBS}:{job}", "--set", "post_validation=true", *flags, *out)
    assert done.code == 2
    assert words in done.err
    assert "hint: " in done.err


def test_a_step_that_differs_is_told_and_exits_1(call: Call) -> None:
    done = call("check", f"{JOBS}:wrong_gradient", "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert not found["ok"]
    assert found["max_relative_difference"] > 0.1
    assert "the loss differs by" in found["why"]


def test_a_model_that_cannot_be_traced_is_told_and_exits_1(call: Call) -> None:
    done = call("check", f"{JOBS}:untraceable", "--json")
    assert done.code == 1
    found = json.loads(done.out)
    assert (found["ok"], found["traced"]) == (False, False)
    assert "if y.sum() > 0:" in found["why"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stages", "40"],
        ["--schedule", "gpip"],
        ["--replicas", "5"],
        ["--plan", "nowhere.json"],
        ["--set", "units=0"],
        ["--set", "units=blocks"],
    ],
)
def test_bad_usage_exits_2(call: Call, arguments: list[str]) -> None:
    done = call("check", f"{JOBS}:small", *arguments)
    assert done.code == 2
    assert done.err.count("error: ") == 1
    assert done.err.count("hint: ") == 1


def test_replicas_that_do_not_divide_a_step_share_it_as_evenly_as_can_be(call: Call) -> None:
    done = call("check", f"{JOBS}:dropout", "--stages", "1", "--replicas", "3", "--json")
    assert done.code == 0, done.err
    assert (json.loads(done.out)["replicas"], json.loads(done.out)["ok"]) == (3, True)


def test_schedule_of_a_file_or_with_arguments_is_compared(call: Call, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("rank 0  F0.1 F0.0 I0.0 B0.1 W0.0\nrank 1  F1.1 F1.0 B1.1 B1.0\n")
    for schedule, stages, replicas in ((str(mine), 2, 2), ("zb_greedy(limit=3)", 3, 1)):
        flags = [] if stages == 2 else ["--stages", str(stages)]
        done = call("check", f"{JOBS}:dropout", "--schedule", schedule, *flags, "--json")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        assert (found["stages"], found["replicas"]) == (stages, replicas)
        assert found["schedule"] == ("mine" if stages == 2 else schedule)
