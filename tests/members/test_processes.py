"""Processes: ranks that are killed, or whose machine has had notice, and what started them."""

import errno
import json
import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.errors import JobError, RunError
from penstock.members import launch_members
from penstock.members.launch_members import Scribe, Start, run_members
from penstock.members.member import RunMember
from penstock.members.mesh import Mesh
from penstock.members.own_fault import is_own_fault
from penstock.members.words import Failed, Told, View
from penstock.pilot.losses import PlanBasis
from penstock.plan import Plan
from penstock.runtime.calls import StepResult
from penstock.runtime.rank import Rank
from penstock.runtime.worker import RankResult
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from penstock.training.events import EVENTS
from tests.members import runs
from tests.parity.models import plain_loop

SCRIBE = Scribe(lambda step: None, lambda results: None)


def counting(folder: Path) -> Scribe:
    """Return what writes down how many ranks measured something at the end."""

    def finish(results: list[RankResult] | None) -> None:
        (folder / "ended").write_text(str(len(results or ())))

    return Scribe(lambda step: None, finish)


def start_of(ways: PlanBasis, plans: dict[int, Plan], folder: Path) -> Start:
    task = partial(runs.task_of, folder=folder)
    run = ElasticRun(ways, task, plans, Begin(), ways.ways[0].job.num_steps, folder)
    most = max(plans)
    view = View(1, 0, text_of(plans[most]), tuple(range(most)))
    return Start(view, b"token", lambda: RunPilot(run))


def events_in(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]


@pytest.mark.timeout(100)
def test_who_sleeps_when_the_run_is_over_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_members, "_ENDS_S", 0.1)
    pipes = {member: multiprocessing.Pipe(duplex=False) for member in range(2)}
    pipes[0][1].send_bytes(json.dumps(["done", None]).encode())
    receivers = {member: receiver for member, (receiver, _) in pipes.items()}
    assert launch_members._supervise({}, receivers, lambda step: None) == (True, {})


def test_memory_that_finds_no_room_is_told_by_the_line_that_asks_for_it() -> None:
    said = list[Failed]()
    mesh = cast(Mesh, SimpleNamespace(tell=said.append))
    try:
        raise OSError(errno.EFBIG, "File too large")
    except OSError as problem:
        error = launch_members._failed(mesh, problem)
    assert f"memory or a file at {__file__}:" in error.message
    assert "ulimit -f" in error.hint
    assert [each.message for each in said] == [error.message]
    named = launch_members._failed(
        mesh, OSError(errno.ENOSPC, "No space left on device", "plan.json")
    )
    assert named.message == "cannot write plan.json: No space left on device"


class Signals:
    """Sends signals to members while steps are told: by step, which one to whom."""

    def __init__(self, signals: dict[int, tuple[int, int]]) -> None:
        self.signals, self.steps, self.pids = signals, list[StepResult](), list[int]()

    def __call__(self, step: StepResult) -> None:
        if not self.pids:
            self.pids = sorted(child.pid or 0 for child in multiprocessing.active_children())
        self.steps.append(step)
        if step.step in self.signals:
            which, member = self.signals.pop(step.step)
            os.kill(self.pids[member], which)


def test_one_is_killed_and_one_has_notice_and_the_last_one_finishes(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    shapes = {3: (3, 1), 2: (1, 2), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    signals = Signals({0: (signal.SIGKILL, 1), 2: (signal.SIGTERM, 2)})
    assert run_members(start_of(ways, plans, tmp_path), signals, counting(tmp_path))
    num_left = int((tmp_path / "ended").read_text())
    events = events_in(tmp_path)
    assert [event["what"] for event in events[:2]] == ["begins", "lost"]
    assert events[1]["gone"] == {"1": "died"}
    assert {"2": "notice"} in [event["gone"] for event in events] or num_left == 2  # too late
    assert [step.step for step in signals.steps] == list(range(runs.STEPS))
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    kept = checkpoint.load(newest)
    expected = plain_loop(runs.job_of("gpt"), runs.STEPS, runs.MICRO_BATCHES)
    for key, value in expected.weights.items():
        torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)
    assert multiprocessing.active_children() == []


def test_a_rank_that_is_short_of_memory_leaves_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1), 1: runs.plan_for(ways, 1, 1)}
    counts = RunMember.counts

    def short(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if member.mesh.own == 1 and told.step == 1:
            try:
                raise MemoryError("no more")
            except MemoryError as problem:  # as a step of the job's own optimizer is told
                raise JobError("a step of the job's optimizer fails") from problem

    monkeypatch.setattr(RunMember, "counts", short)
    assert run_members(start_of(ways, plans, tmp_path), lambda step: None, counting(tmp_path))
    assert [event["gone"] for event in events_in(tmp_path)] == [{}, {"1": "left"}]
    said = capfd.readouterr().err
    assert "member 1: MemoryError: no more: this rank leaves" in said
    assert "rank 1 left: 1 rank goes on from step 2 on" in said
    assert (tmp_path / "ended").read_text() == "1"


@pytest.mark.parametrize(
    ("problem", "is_own"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError(), True),
        (OSError(errno.EMFILE, "short"), True),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (FileNotFoundError(errno.ENOENT, "none"), False),
        (ValueError("DataLoader worker (pid 7)"), False),
    ],
)
def test_what_says_nothing_of_the_job_is_told_from_what_does(
    problem: Exception, is_own: bool
) -> None:
    assert is_own_fault(problem) is is_own


def test_a_job_that_fails_ends_all_ranks_with_its_error(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1), 1: runs.plan_for(ways, 1, 1)}
    start = start_of(ways, plans, tmp_path)

    def fails(step: StepResult) -> None:
        (tmp_path / "checkpoints").write_text("in the way")

    with pytest.raises(RunError, match="checkpoint"):
        run_members(start, fails, SCRIBE)
    assert multiprocessing.active_children() == []
