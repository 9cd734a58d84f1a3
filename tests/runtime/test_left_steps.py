"""Left steps: an error of the job's own in the middle of a step leaves those before it."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.run_windows import windows_of
from penstock.errors import AloneError, BatchMisfitError, RunError
from penstock.job import Job
from penstock.plan.lower_plan import stages_of
from penstock.runtime.finite import NotFinite, NotFiniteError
from penstock.runtime.launch import run_processes, run_threads
from penstock.runtime.left_steps import complete, leaving_steps
from penstock.runtime.worker import Task, work
from tests.members import runs
from tests.parity.models import data, plain_loop, plan_of

AT = 2 * runs.MICRO_BATCHES + 1  # a micro-batch of the third step


def failing(job: Job, ranks: int) -> Job:
    """Return a job whose data fails in the third step, once all ranks are in that."""
    come, has_come = multiprocessing.get_context("fork").Barrier(ranks), list[bool]()

    def broken(start: int) -> Iterator[Any]:
        for number, batch in enumerate(data(start), start):
            if number >= AT - 1 and not has_come:  # a rank may begin to read behind it
                has_come.append(True)
                come.wait(300.0)
            if number >= AT:
                raise ArithmeticError("row 9 is broken")
            yield batch

    return replace(job, data=broken)


def task_of(name: str, folder: Path, stages: int, replicas: int) -> Task:
    captured = runs.captured_of(name)
    share = runs.MICRO_BATCHES // replicas
    plan = plan_of(captured.graph, "one_f_one_b", stages, share, replicas=replicas)
    windows = windows_of(captured.graph, plan, range(runs.STEPS), [])
    about = (
        captured,
        stages_of(plan, captured.graph),
        failing(runs.job_of(name), plan.total_ranks),
        windows,
    )
    return Task(*about, policy=SavePolicy(folder))


def fails(task: Task, count: int, run: Callable[..., Any]) -> None:
    with pytest.raises(RunError, match="row 9 is broken"):
        run(partial(work, task), count, lambda step: None, groups=task.groups)


@pytest.mark.parametrize(
    ("stages", "replicas", "run"),
    [(1, 1, run_threads), (2, 1, run_processes), (1, 2, run_processes)],
)
def test_what_all_ranks_hold_becomes_a_checkpoint(
    stages: int, replicas: int, run: Callable[..., Any], tmp_path: Path
) -> None:
    fails(task_of("gpt", tmp_path, stages, replicas), stages * replicas, run)
    assert checkpoint.latest(tmp_path) is None  # until who has started the ranks completes it
    newest = complete(tmp_path)
    assert newest == checkpoint.latest(tmp_path) is not None
    kept, expected = checkpoint.load(newest), plain_loop(runs.job_of("gpt"), 2, runs.MICRO_BATCHES)
    assert kept.step == 2
    for key, value in expected.weights.items():
        torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)
    assert complete(tmp_path) is None


def test_nothing_is_left_of_buffers_that_have_moved_on(tmp_path: Path) -> None:
    fails(task_of("batch_norm", tmp_path, 1, 1), 1, run_threads)
    assert complete(tmp_path) is None


def test_parts_of_which_one_lacks_become_nothing(tmp_path: Path) -> None:
    fails(task_of("gpt", tmp_path, 2, 1), 2, run_processes)
    (hidden,) = tmp_path.glob(".step-*")
    (hidden / "1.left").unlink()
    assert complete(tmp_path) is None
    (hidden / "1.left").write_text(json.dumps({"ranks": 3}))
    assert complete(tmp_path) is None


@pytest.mark.parametrize(("updates", "served"), [(0, ""), (1, ""), (0, "async")])
def test_a_rank_that_has_begun_an_update_or_has_a_server_leaves_nothing(
    updates: int, served: str, tmp_path: Path
) -> None:
    rank: Any = _Rank(updates, served)
    with pytest.raises(ArithmeticError), leaving_steps(tmp_path, rank, lambda: ({}, {}), 1):
        raise ArithmeticError
    assert rank.transport.reasons == ["ArithmeticError"]
    assert (complete(tmp_path) is not None) is (updates == 0 and not served)


@pytest.mark.parametrize(
    "problem",
    [
        NotFiniteError(NotFinite("the loss", "nan", 2, (8,))),
        AloneError("ranks would share what forward keeps"),
        BatchMisfitError("a batch of 3 samples"),
    ],
)
def test_what_makes_steps_doubtful_and_the_first_step_leave_nothing(
    problem: RunError, tmp_path: Path
) -> None:
    rank: Any = _Rank(0)
    with pytest.raises(type(problem)), leaving_steps(tmp_path, rank, lambda: ({}, {}), 1):
        raise problem
    with pytest.raises(ArithmeticError), leaving_steps(tmp_path, rank, lambda: ({}, {}), 2):
        raise ArithmeticError
    assert complete(tmp_path) is None


class _Rank:
    """As much of a rank as is asked for: two steps are done, and so many updates begun."""

    def __init__(self, updates: int, served: str = "") -> None:
        self.rank, self.weights, self.carried, self.unsettled, self.served = 0, {}, {}, [], served
        self.progress = _With(first_step=2, updates=updates)
        self.capture, self.job = _With(graph=_With(written=frozenset())), _With(state={})
        reasons = list[str]()
        self.transport = _With(num_ranks=1, reasons=reasons, abort=reasons.append)


class _With:
    def __init__(self, **named: Any) -> None:
        vars(self).update(named)
