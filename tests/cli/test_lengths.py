"""Steps of several shapes under torchrun, and where ranks come and go, by the command."""

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.cli import main
from penstock.members.member import RunMember
from penstock.members.words import Told
from penstock.runtime.rank import Rank
from tests.cli.conftest import Call
from tests.cli.test_elastic import LIMIT_S, beside, until
from tests.runtime.as_torchrun import as_torchrun
from tests.training.test_key_session import job_of, plain

STEPS = 8


def rows(folder: Path, name: str) -> list[dict]:
    path = folder / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(folder: Path) -> None:
    """Compare what a run in `folder` gave with a loop: each step once, and all weights."""
    assert [row["step"] for row in rows(folder, "metrics.jsonl")] == list(range(1, STEPS + 1))
    state = checkpoint.load(checkpoint.latest(folder / "checkpoints")).tensors
    for name, value in plain(job_of()).items():
        torch.testing.assert_close(state[f"weights/{name}"], value, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def there(monkeypatch: pytest.MonkeyPatch, profiles: Path) -> str:
    """Return what names the job."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))
    return f"{Path(__file__).parents[1]}/training/test_key_session.py:job_of"


@pytest.mark.long
def test_ranks_of_torchrun_train_and_go_on_as_a_loop(there: str, tmp_path: Path) -> None:
    for steps in (3, STEPS):
        command = ["train", there, "--out", str(tmp_path / "run"), "--steps", str(steps)]
        done = as_torchrun(partial(main, [*command, "--resume"]), tmp_path, nodes=2)
        assert [code for code, _, _ in done] == [0, 0], done
        assert (
            "equal to the plain loop"
            in json.loads((tmp_path / "run" / "summary.json").read_text())["checked"]
        )
    check(tmp_path / "run")


@pytest.mark.long
def test_one_is_killed_another_joins_and_the_run_goes_on_by_torchrun(
    there: str, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, killed = RunMember.counts, tmp_path / "killed"

    def mortal(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if told.step == 1 and member.mesh.own == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if told.step == 3 and member.is_first:
            view = member.last_view
            assert member.mesh.wait(lambda: bool(member._newcomers(view)), LIMIT_S)

    monkeypatch.setattr(RunMember, "counts", mortal)
    folder = tmp_path / "run"
    command = ["train", there, "--elastic", "--ranks", "2", "--out", str(folder)]
    with beside(lambda: main([*command, "--steps", "7"])):
        until(lambda: len(rows(folder, "events.jsonl")) == 2)
        done = call("join", folder, "--json")
    assert done.code == 0, done.err
    events = rows(folder, "events.jsonl")
    assert [len(event["members"]) for event in events] == [2, 1, 2]
    command = ["train", there, "--elastic", "--resume", "--out", str(folder)]
    monkeypatch.setattr(RunMember, "counts", counts)
    ended = as_torchrun(partial(main, command), tmp_path, nodes=2)
    assert [code for code, _, _ in ended] == [0, 0], ended
    check(folder)
