"""Failing: a job's own error ends the run for all, with a checkpoint of the steps before it."""

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError, JobError, RunError
from penstock.job import Job
from penstock.listener import SILENT
from penstock.members.failing import may_be_saved
from penstock.pilot.losses import PlanBasis
from penstock.program.instructions import Guarding
from penstock.runtime.finite import NotFinite, NotFiniteError
from penstock.state.weights import StageWeights
from penstock.training.results import explained
from tests.members import runs
from tests.parity.models import data, plain_loop

AT = 2 * runs.MICRO_BATCHES + 1  # a micro-batch of the third step


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def failing(problem: BaseException, ranks: int, *, everywhere: bool = False) -> PlanBasis:
    """Return what plans are made from of a job whose data fails, on one rank or on all."""
    failed = threading.Event()

    def broken(start: int) -> Iterator[Any]:
        for number, batch in enumerate(data(start), start):
            if number >= AT and (everywhere or not failed.is_set()):
                failed.set()
                raise problem
            yield batch

    ways = runs.ways_of("gpt", "adamw", ranks)
    (way,) = ways.ways
    return replace(ways, ways=(way._replace(job=replace(way.job, data=broken)),))


@pytest.mark.parametrize("shape", [(1, 3), (3, 1), (1, 1)], ids=["replicas", "pipeline", "alone"])
def test_an_error_in_data_ends_all_with_a_checkpoint_of_the_steps_before_it(
    shape: tuple[int, int], tmp_path: Path
) -> None:
    count = shape[0] * shape[1]
    ways = failing(ArithmeticError("row 9 is broken"), count)
    told = runs.run(ways, {count: runs.plan_for(ways, *shape)}, count, tmp_path)
    assert len(told.ended) == count
    for end in told.ended.values():
        assert isinstance(end.problem, RunError)
        assert "ArithmeticError: row 9 is broken" in str(end.problem)
    check_kept(tmp_path, 2)
    assert {step.step for step in told.steps} == {0, 1}


def spoiled(monkeypatch: pytest.MonkeyPatch, *, everywhere: bool) -> None:
    """Let the update of the third step change a part of the weights, and fail: once, or always."""
    first, step = threading.Lock(), StageWeights.step

    def broken(weights: StageWeights, number: int, factor: float = 1.0) -> None:
        if number == 2 and (first.acquire(blocking=False) or everywhere):
            weights.flats[0].zero_()
            raise KeyError("momentum of row 9")
        step(weights, number, factor)

    monkeypatch.setattr(StageWeights, "step", broken)


def check_kept(folder: Path, steps: int, job: Job | None = None) -> None:
    """Check that the newest checkpoint is that of a plain loop of so many steps."""
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    kept = checkpoint.load(newest)
    expected = plain_loop(job or runs.job_of("gpt"), steps, runs.MICRO_BATCHES)
    assert kept.step == steps
    for key, value in expected.weights.items():
        torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)


BESIDE = {"replicas": ((1, 3), None), "grid": ((2, 2), None)}
GUARDED = {"copies": ((3, 1), Guarding(0, 1)), "log": ((3, 1), Guarding(3, 1))}


@pytest.mark.parametrize("name", [*BESIDE, *GUARDED])
@pytest.mark.sampled(2)
def test_where_the_update_of_one_rank_fails_the_others_write_what_counts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, guard = (BESIDE | GUARDED)[name]
    spoiled(monkeypatch, everywhere=False)
    count = shape[0] * shape[1]
    ways = runs.ways_of("gpt", "adamw", count)
    told = runs.run(ways, {count: runs.plan_for(ways, *shape, guard=guard)}, count, tmp_path)
    assert len(told.ended) == count
    for end in told.ended.values():
        assert isinstance(end.problem, RunError | KeyError)
        assert "momentum of row 9" in str(end.problem)
    check_kept(tmp_path, 3)
    assert {step.step for step in told.steps} == {0, 1, 2}


@pytest.mark.parametrize("name", GUARDED)
def test_where_all_updates_fail_guards_write_the_step_before(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, guard = GUARDED[name]
    spoiled(monkeypatch, everywhere=True)
    ways = runs.ways_of("gpt", "adamw", 3)
    told = runs.run(ways, {3: runs.plan_for(ways, *shape, guard=guard)}, 3, tmp_path)
    assert [str(e.problem) for e in told.ended.values() if "row 9" not in str(e.problem)] == []
    check_kept(tmp_path, 2)


def test_where_all_replicas_fail_in_an_update_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled(monkeypatch, everywhere=True)
    ways = runs.ways_of("gpt", "adamw", 2)
    told = runs.run(ways, {2: runs.plan_for(ways, 1, 2)}, 2, tmp_path, every=2)
    assert [str(e.problem) for e in told.ended.values() if "row 9" not in str(e.problem)] == []
    check_kept(tmp_path, 2)


def test_a_rank_that_dies_meanwhile_keeps_nobody_from_writing_it(tmp_path: Path) -> None:
    ways = failing(ArithmeticError("row 9 is broken"), 3, everywhere=True)
    plans = {3: runs.plan_for(ways, 1, 3), 2: runs.plan_for(ways, 1, 2)}
    told = runs.run(ways, plans, 3, tmp_path, runs.doomed_between((9, 0, 0), 1, 3))
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert checkpoint.load(newest).step == 2
    assert sum(isinstance(end.problem, RunError) for end in told.ended.values()) == 2


def test_the_error_names_the_checkpoint_from_which_the_run_can_go_on(tmp_path: Path) -> None:
    job = runs.job_of("gpt")
    assert explained(tmp_path, job, RunError("row 9 is broken"), SILENT).hint == ""
    folder = checkpoint.folder_of(tmp_path / "checkpoints", 2)
    folder.mkdir(parents=True)
    (folder / "state.json").touch()
    told = explained(tmp_path, job, RunError("row 9 is broken"), SILENT)
    assert told.hint == "resume=True continues from step-000002"
    told = explained(tmp_path, job, RunError("no", hint="do this"), SILENT)
    assert told.hint == "do this; resume=True continues from step-000002"
    told = explained(tmp_path, job, RunError("no", hint="resume=True, on more ranks"), SILENT)
    assert told.hint == "resume=True, on more ranks"


class _Vote:
    def __init__(self, passed: int) -> None:
        self.passed = passed


@pytest.mark.parametrize(
    ("problem", "passed", "done", "is_saved"),
    [
        (ValueError(), 1, 2, True),
        (MemoryError(), -1, 2, True),
        (JobError("the data ended"), 1, 2, True),
        (ValueError(), 2, 2, False),  # it came in the update, after the step has counted
        (ValueError(), -1, 0, False),  # nothing has been done
        (OSError(errno.ENOSPC, ""), 1, 2, False),
        (CheckpointError("no"), 1, 2, False),
        (NotFiniteError(NotFinite("the loss", "nan", 2, (8,))), 1, 2, False),
    ],
)
def test_a_checkpoint_is_written_where_all_still_hold_the_step_before(
    problem: Exception, passed: int, done: int, *, is_saved: bool, tmp_path: Path
) -> None:
    vote: Any = _Vote(passed)
    assert may_be_saved(problem, vote, done, tmp_path, alone=True) == is_saved
    assert not may_be_saved(problem, None, done, tmp_path, alone=True)
    assert not may_be_saved(problem, vote, done, None, alone=True)
    folder = checkpoint.folder_of(tmp_path, done)
    folder.mkdir()
    (folder / "state.json").touch()
    assert not may_be_saved(problem, vote, done, tmp_path, alone=True)  # there is one
    in_update = may_be_saved(problem, vote, done, tmp_path, alone=False)
    assert in_update == (isinstance(problem, ValueError) and passed >= done)
