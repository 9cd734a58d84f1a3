"""penstock train A B: each trains what it trains alone, and neither needs the other to end."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.training import lock
from tests.cli.conftest import MLP, PENSTOCK, Call

SLOW = """
import time
from dataclasses import replace
from tests.cli import mlp

def data(start):
    for batch in mlp.data(start):
        time.sleep(0.02)
        yield batch

def one():
    return replace(mlp.job(), data=data, num_steps=60)

def other():
    return replace(mlp.adam(), data=data, num_steps=60)
"""


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    return dict(checkpoint.load(newest).tensors)


@pytest.mark.long
def test_each_job_has_the_bits_that_it_has_alone(call: Call, tmp_path: Path) -> None:
    given = "--ranks", "2", "--steps", "6", "--set", "trial=false"
    out = tmp_path / "both"
    done = call("train", f"{MLP}:job", f"{MLP}:adam", *given, "--out", out, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["codes"] == {"mlp-job": 0, "mlp-adam": 0}
    assert told["together_s"] > 0
    assert 0 < told["predicted_by_turns_s"] <= 1.01 * told["predicted_one_by_one_s"]
    assert json.loads((out / "both.json").read_text())["codes"] == told["codes"]
    for name, job in ("mlp-job", "job"), ("mlp-adam", "adam"):
        alone, own = tmp_path / name, out / name
        assert told["jobs"][name]["steps"] == 6
        assert (own / "report.html").exists()
        plan = "--plan", own / "plan.json", "--steps", "6"
        assert call("train", f"{MLP}:{job}", *plan, "--out", alone).code == 0
        found = tensors(alone)
        assert found.keys() == tensors(own).keys()
        for key, value in tensors(own).items():
            assert torch.equal(value, found[key]), key


@pytest.fixture
def both(call: Call, tmp_path: Path):
    """Start two jobs that take their time; give the command, and the folder of each."""
    jobs = tmp_path / "slow.py"
    jobs.write_text(SLOW)
    out = tmp_path / "both"
    command = [*PENSTOCK, "train", f"{jobs}:one", f"{jobs}:other", "--ranks", "2", "--out", out]
    command += ["--set", "trial=false", "--set", "check=false", "--set", "checkpoint_every=1"]
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    folders = out / "slow-one", out / "slow-other"
    with subprocess.Popen(
        list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while not all((each / "metrics.jsonl").exists() for each in folders):
                assert process.poll() is None, process.stderr and process.stderr.read()
                time.sleep(0.02)
            yield process, folders
        finally:
            process.kill()


def nobody_has(folder: Path) -> None:
    """Return once no process names the folder; the test's own limit ends the wait."""
    while any(_names(path, folder) for path in Path("/proc").glob("[0-9]*/cmdline")):
        time.sleep(0.05)


def _names(path: Path, folder: Path) -> bool:
    try:
        return str(folder).encode() in path.read_bytes()
    except OSError:
        return False


def test_when_one_is_killed_the_other_trains_on(both) -> None:
    process, (first, second) = both
    pid = lock.holding_pid(first)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == 1
    assert "slow-one ended with -9" in err
    assert json.loads((second / "summary.json").read_text())["steps"] == 60
    assert not (first / "summary.json").exists()
    nobody_has(first)


@pytest.mark.long
def test_interrupt_ends_both_with_a_checkpoint_and_leaves_no_process(both) -> None:
    process, folders = both
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    for folder in folders:
        assert checkpoint.latest(folder / "checkpoints") is not None
        nobody_has(folder)


@pytest.mark.long
def test_when_the_command_is_killed_both_jobs_are(both) -> None:
    process, folders = both
    process.kill()
    process.communicate()
    for folder in folders:
        nobody_has(folder)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--elastic",), "elastic is of one job"),
        (("--plan", "plan.json"), "plan is of one job"),
        (("--set", "until_loss=1"), "until_loss is of one job"),
        (("--set", "turns=first:/tmp/x"), "turns is of one job"),
        (("--out", "memory://runs"), "out is memory://runs"),
    ],
)
def test_what_does_not_go_with_two_jobs_is_refused(call: Call, given, words: str) -> None:
    error, hint = call("train", f"{MLP}:job", f"{MLP}:adam", *given).refusal(2)
    assert words in error
    assert hint


def test_two_jobs_are_not_started_by_torchrun(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("RANK", "0")
    error, hint = call("train", f"{MLP}:job", f"{MLP}:adam").refusal(1)
    assert "torchrun has started this" in error
    assert "turns=first:DIR" in hint


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("turns=third:/tmp",), "turns is 'third:/tmp'"),
        (("turns=first:/tmp", "elastic=true"), "elastic lets ranks change"),
        (("turns=first:/tmp", "until_loss=1"), "until_loss lets ranks change"),
    ],
)
def test_turns_that_cannot_be_are_refused(call: Call, given, words: str, tmp_path: Path) -> None:
    sets = [word for text in given for word in ("--set", text)]
    error, hint = call("train", f"{MLP}:job", "--out", tmp_path / "run", *sets).refusal(2)
    assert words in error
    assert hint
