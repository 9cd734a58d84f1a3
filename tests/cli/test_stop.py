"""penstock train: signals, checkpoints by time, and the lock of a run's folder."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.choose.run_windows import CheckpointInterval, parse_every
from penstock.errors import PlanError
from penstock.training.lock import locked
from penstock.training.results import lines
from tests.cli.conftest import Call

JOBS = f"{Path(__file__).parent / 'training.py'}"
TWO = ["--ranks", "2", "--set", "stages=2", "--schedule", "one_f_one_b"]


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint: weights, buffers, the optimizer's state."""
    parts = (folder / "checkpoints" / f"step-{step:06d}").glob("*.safetensors")
    return {name: value for part in parts for name, value in load_file(part).items()}


@pytest.mark.parametrize(
    ("name", "flags", "code"), [("interrupted", TWO, 130), ("terminated_eagerly", [], 143)]
)
@pytest.mark.sampled(2)
def test_a_signal_ends_the_step_under_way_with_a_checkpoint_to_go_on_from(
    call: Call, tmp_path: Path, name: str, flags: list[str], code: int
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = call(
        "train", f"{JOBS}:{name}", "--out", parts, "--set", "check=false", *flags
    )  # it reads, too
    assert done.code == code, done.err
    assert f"continue with: penstock train {JOBS}:{name} --out {parts} --resume\n" in done.err
    assert "error:" not in done.err
    stopped = len(rows(parts))
    assert 0 < stopped < 6
    (newest,) = (parts / "checkpoints").glob("step-*")
    assert newest.name == f"step-{stopped:06d}"
    assert not (parts / "summary.json").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    quiet = name.replace("interrupted", "unsignalled").replace("terminated", "unsignalled")
    assert call("train", f"{JOBS}:{quiet}", "--out", parts, "--resume").code == 0
    assert call("train", f"{JOBS}:{quiet}", "--out", whole, *flags).code == 0
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)]
    mine, expected = state(parts, 6), state(whole, 6)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[key], value) for key, value in expected.items())


def test_a_second_signal_ends_at_once(call: Call, tmp_path: Path) -> None:
    done = call(
        "train", f"{JOBS}:killed_at_once", "--set", "check=false", "--out", tmp_path / "run"
    )
    assert done.code == 143, done.err
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_resume_where_nothing_is_starts_afresh_and_says_so(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "run"
    often = ["--set", "checkpoint_every=2"]
    done = call("train", f"{JOBS}:untraceable", "--out", out, "--resume", *often)
    assert done.code == 0, done.err
    assert "no checkpoint to resume from: starting afresh" in done.err
    assert len(rows(tmp_path / "run")) == 5
    names = sorted(path.name for path in (out / "checkpoints").glob("step-*"))
    assert names == ["step-000004", "step-000005"]


def test_writers_get_every_row_as_the_file_does(call: Call, tmp_path: Path) -> None:
    done = call("train", f"{JOBS}:written", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    told = [line for line in done.err.splitlines() if line.startswith("row ")]
    assert told == [f"row {row}" for row in rows(tmp_path / "run")]


def test_rows_are_strict_json(tmp_path: Path) -> None:
    with lines(tmp_path / "rows") as write:
        write({"step": 1, "loss": 0.5, "accuracy": math.nan, "gap": -math.inf})
    text = (tmp_path / "rows").read_text()
    assert text == '{"step": 1, "loss": 0.5, "accuracy": null, "gap": null}\n'


def test_a_loss_that_is_not_finite_fails_the_run(call: Call, tmp_path: Path) -> None:
    out, often = tmp_path / "run", ["--set", "checkpoint_every=2"]
    done = call("train", f"{JOBS}:not_finite", "--out", out, *often, *TWO)
    error, hint = done.refusal(1)
    assert error == "the loss of step 3, micro-batch 1 (number 9 of the data), is nan on rank 1"
    assert "first nan: aten.sqrt.default " in done.err
    assert f"{JOBS.removeprefix('./')}:" in done.err
    assert hint.endswith("; --resume continues from step-000002")
    assert len(rows(out)) == 2
    assert not (out / "summary.json").exists()
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == ["step-000002"]


def test_figures_and_validations_are_in_rows_summary_report_and_progress(
    call: Call, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = call("train", f"{JOBS}:figured", "--out", out, *TWO, "--json")
    assert done.code == 0, done.err
    told = rows(out)
    assert [row["step"] for row in told if "val_loss" in row] == [2, 4, 5]
    assert all(row["size"] > 0 for row in told)
    assert [row["gap"] is None for row in told] == [False, True, False, False, False]
    summary = json.loads(done.out)
    assert summary == json.loads((out / "summary.json").read_text())
    assert summary["val_loss"] == told[-1]["val_loss"]
    assert summary["val_size"] == told[-1]["val_size"]
    assert summary["train_size"] == pytest.approx(sum(row["size"] for row in told) / 5)
    best = min((row for row in told if "val_loss" in row), key=lambda row: row["val_loss"])
    assert (summary["best_step"], summary["best_val_loss"]) == (best["step"], best["val_loss"])
    assert summary["validation_s"] == pytest.approx(sum(row.get("val_seconds", 0) for row in told))
    assert (
        json.loads((out / "checkpoints" / "best" / "state.json").read_text())["step"]
        == (best["step"])
    )
    assert f"val loss {told[-1]['val_loss']:.4f}" in done.err
    assert f"size {told[-1]['size']:.4f}" in done.err
    page = (out / "report.html").read_text()
    assert "<title>validation</title>" in page


# -- how often ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("500", CheckpointInterval(500)),
        ("30s", CheckpointInterval(0, 30.0)),
        ("10m", CheckpointInterval(0, 600.0)),
        ("1.5h", CheckpointInterval(0, 5400.0)),
    ],
)
def test_every_is_steps_or_a_time(text: str, every: CheckpointInterval) -> None:
    assert parse_every(text) == every


@pytest.mark.parametrize("text", ["", "0", "0s", "-5", "1.5", "10 x", "m", "1e3", "9" * 400, "nan"])
def test_every_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="neither a number of steps nor a time") as caught:
        parse_every(text)
    assert "30s" in caught.value.hint


def test_asynchronous_schedules_drain_as_often_as_the_clock_would_save() -> None:
    assert CheckpointInterval(7).window_steps(1.0) == 7
    assert CheckpointInterval(0, 10.0).window_steps(2.0) == 5
    assert CheckpointInterval(0, 10.0).window_steps(60.0) == 1
    assert (
        CheckpointInterval(0, 10.0).window_steps(1e-6)
        == CheckpointInterval(0, 10.0).window_steps(None)
        == 100
    )


def test_bad_interval_is_refused(call: Call, tmp_path: Path) -> None:
    done = call(
        "train", f"{JOBS}:small", "--out", tmp_path / "run", "--set", "checkpoint_every=often"
    )
    error, hint = done.refusal(2)
    assert '"often"' in error
    assert "10m" in hint


# -- the lock -------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from penstock.training.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_a_second_run_into_a_folder_is_refused(
    call: Call, tmp_path: Path, flags: list[str]
) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            done = call("train", f"{JOBS}:small", "--out", folder, *flags)
            error, hint = done.refusal(1)
            assert f"{folder} is in use by process {holder.pid} on {os.uname().nodename}" in error
            assert time.strftime("%Y-") in error
            assert "--out" in hint
            assert [path.name for path in folder.iterdir()] == [".lock"]
        finally:
            holder.kill()
    with locked(folder):  # what a killed process leaves is no obstacle
        assert (folder / ".lock").exists()
    assert list(folder.iterdir()) == []


def test_the_lock_leaves_no_empty_folder(tmp_path: Path) -> None:
    with locked(tmp_path / "a" / "run"):
        pass
    assert not (tmp_path / "a" / "run").exists()
    with locked(tmp_path / "run"):
        (tmp_path / "run" / "plan.json").write_text("kept")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.json"]
