"""Look: what a device that queues is asked once a step, here one that only says that it does."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime import bind, end_of_step
from penstock.runtime.calls import Progress, StepResult
from penstock.runtime.finite import NotFiniteError
from penstock.runtime.host_numbers import UnseenNorm, look
from penstock.runtime.launch import run_threads
from penstock.runtime.worker import Task, work
from tests.parity.models import plan_of
from tests.parity.training import listed
from tests.runtime.test_finite import WAYS, data_of_zero, job, norm_loss


@pytest.fixture
def queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks take their device for one that queues."""
    device = SimpleNamespace(is_queued=True, read=lambda numbers: numbers.tolist())
    for module in (bind, end_of_step):
        monkeypatch.setattr(module, "of", lambda place: device)


def losses_of(own: Job) -> list[StepResult]:
    """Return what three steps of two stages tell."""
    captured = capture(own)
    plan = plan_of(captured.graph, "one_f_one_b", 2, own.micro_batches, replicas=1, clip=True)
    program = lower_plan(plan, captured.graph)
    windows = listed(tuple((program, step) for step in range(3)))
    task, told = Task(captured, stages_of(plan, captured.graph), own, windows), list[StepResult]()
    run_threads(lambda end, tell: work(task, end, tell), plan.total_ranks, told.append)
    return [replace(step, seconds=0.0) for step in told]


@pytest.mark.parametrize("limit", [1e-3, 1e9])
def test_norm_that_clips_unseen_clips_as_one_that_is_seen(limit: float, request) -> None:
    own = job(clip_norm=limit)
    seen = sorted(losses_of(own), key=lambda step: (step.step, step.loss is None))
    request.getfixturevalue("queued")
    assert sorted(losses_of(own), key=lambda step: (step.step, step.loss is None)) == seen


@pytest.mark.usefixtures("queued")
def test_norm_that_is_not_finite_ends_the_run_before_the_update(tmp_path: Path) -> None:
    own = job(1.0, loss=norm_loss, clip_norm=1.0, data=data_of_zero(6))
    error = WAYS["threads"](own, tmp_path)
    assert error.message.startswith("the norm of the gradient of first.")
    assert "in step 2 is nan on rank " in error.message


@pytest.mark.usefixtures("queued")
def test_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    assert "the loss of step 2" in WAYS["threads"](job(-1e9), tmp_path).message


def rank_of(progress: Progress) -> SimpleNamespace:
    def refuse_norm(value: float, step: int, names: list[str]) -> None:
        raise ValueError(value, step, names)

    device = torch.device("cpu")
    numbers = lambda step: (0, 1)  # noqa: E731
    return SimpleNamespace(
        progress=progress, device=device, refuse_norm=refuse_norm, numbers=numbers
    )


def test_norm_and_loss_of_a_step_are_seen_once() -> None:
    progress = Progress(first_step=4)
    progress.unseen = UnseenNorm(torch.tensor(2.0), torch.ones(1), ["w"], 5)
    look(rank_of(progress), 1, [torch.tensor(1.0), torch.tensor([3.0])])
    assert progress.seen_losses == {1: 2.0}
    assert progress.unseen is None


def test_norm_that_is_not_finite_names_its_parameters() -> None:
    progress, norms = Progress(), torch.tensor([1.0, math.nan])
    progress.unseen = UnseenNorm(torch.tensor(math.nan), norms, ["v", "w"], 5)
    with pytest.raises(ValueError, match=r"nan, 5, \['w'\]"):
        look(rank_of(progress), 0, ())


def test_loss_that_is_not_finite_is_refused_with_its_step() -> None:
    with pytest.raises(NotFiniteError, match="step 4"):
        look(rank_of(Progress(first_step=2)), 1, [torch.tensor(math.inf)])


def test_step_that_overflows_is_left_out_whatever_its_norm_is() -> None:
    rank = rank_of(progress := Progress())
    rank.is_guarded = True
    progress.unseen = UnseenNorm(torch.tensor(math.inf), torch.ones(1), ["w"], 5)
    losses = [torch.tensor(1.0), torch.tensor(2.0)]
    assert look(rank, 0, losses, flag=torch.tensor(1.0))
    assert progress.seen_losses == {0: 1.5}
    progress.unseen = UnseenNorm(torch.tensor(2.0), torch.ones(1), ["w"], 6)
    assert not look(rank, 1, (), flag=torch.tensor(0.0))
    progress.unseen = UnseenNorm(torch.tensor(math.inf), torch.tensor([math.inf]), ["w"], 7)
    with pytest.raises(ValueError, match="inf, 7"):
        look(rank, 1, (), flag=torch.tensor(0.0))
