"""An optimizer's own zero_grad is called after each step, and what it leaves is added to the next.

The oracle is a loop of its own, which adds micro-batches to what is left; a run adds what is left
to their sum: the order of additions differs, and with it the last bits.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Optimizer

from penstock.checkpoints import checkpoint
from penstock.errors import JobError
from penstock.prove.plain import Plain
from penstock.prove.prove import Planned, prove, prove_eager
from penstock.state.optimizer.clearing import Clearing, has_own_zero_grad
from penstock.state.optimizer.optimizer import undividable
from tests.parity.optimizing import (
    MICRO_BATCHES,
    STEPS,
    WithNames,
    job_of,
    net,
    run_of,
    windows_from,
)
from tests.parity.training import train


class Every(SGD):
    """Clears every second time: two steps are added up."""

    count = 0

    def zero_grad(self, set_to_none=True):
        self.count += 1
        if self.count % 2 == 0:
            super().zero_grad(set_to_none)


class Fades(SGD):
    """Keeps a part of each gradient: momentum by accumulation."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


class ToZeros(SGD):
    def zero_grad(self, set_to_none=False):
        super().zero_grad(set_to_none=False)


class Resets(SGD):
    """Begins its momentum anew, and lowers its rate, by how often it was told to clear."""

    count = 0

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.count += 1
        for group in self.param_groups:
            group["lr"] = 0.05 / self.count
        if self.count % 3 == 0:
            self.state.clear()


class Wraps(Optimizer):
    """Slow weights around another optimizer, which clears as that does."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.lerp_(self.state[p].setdefault("slow", p.detach().clone()), 0.5)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)


OWN = {
    "every second": lambda weights: Every(weights, lr=0.02, momentum=0.5),
    "fades": lambda weights: Fades(weights, lr=0.02),
    "to zeros": lambda weights: ToZeros(weights, lr=0.02, momentum=0.5),
    "resets": lambda weights: Resets(weights, lr=0.02, momentum=0.9),
    "wraps": lambda weights: Wraps(Every(weights, lr=0.02)),
}


def literally(job, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Train as a script does: step, then zero_grad of the optimizer."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, batches = job.optimizer(WithNames(model)), job.data(0)
    for _ in range(steps):
        for _ in range(MICRO_BATCHES):
            (job.loss(model, next(batches)) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


def assert_close(found, expected) -> None:
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [(1, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("name", OWN)
def test_own_zero_grad_is_called_where_a_loop_calls_it(name, options, tmp_path):
    job, (stages, replicas) = job_of(OWN[name]), options
    run = run_of(job, stages, replicas=replicas)
    assert undividable(job, net()) is None
    assert_close(train(run, tmp_path, (1,) * STEPS).weights, literally(job))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("until", [1, 2, 3])
@pytest.mark.parametrize("name", OWN)
def test_what_it_leaves_goes_on_after_a_resume(name, until, stages, tmp_path):
    job = job_of(OWN[name])
    run = run_of(job, stages)
    train(run, tmp_path / "first", (1,) * until)
    done = checkpoint.latest(tmp_path / "first")
    windows = windows_from(run, until)
    found = train(run, tmp_path / "rest", windows=windows, resume=done)
    assert_close(found.weights, literally(job))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["every second", "fades", "resets"])
def test_proof_knows_what_was_left(name, stages, tmp_path):
    run = run_of(job_of(OWN[name]), stages)
    planned = Planned(run.job, run.captured, run.plan)
    assert prove(planned, (0, 1, 2)).problem == ""
    train(run, tmp_path, (1,))
    assert prove(planned, (1, 2), resume=checkpoint.latest(tmp_path)).problem == ""


def test_proof_sees_that_what_was_left_is_lost(monkeypatch):
    run = run_of(job_of(OWN["every second"]), 1)
    monkeypatch.setattr(Clearing, "call", lambda self: self.optimizer.zero_grad())
    assert prove(Planned(run.job, run.captured, run.plan), (0, 1)).problem


def test_eager_replicas_and_the_plain_loop_do_the_same():
    job = job_of(OWN["every second"])
    assert prove_eager(job, 2, (0, 1, 2)).problem == ""
    plain = Plain(job)
    for step in range(STEPS):
        plain.update(step, plain.gradients(step).gradients)
    assert_close(
        {f"weights/{name}": value for name, value in plain.weights().items()}, literally(job)
    )


def test_zero_grad_that_somebody_put_on_the_object_is_called_too(tmp_path):
    def made(weights) -> Optimizer:
        optimizer = SGD(weights, lr=0.02)
        clears, calls = optimizer.zero_grad, []

        def zero_grad(set_to_none=True):
            calls.append(1)
            if len(calls) % 2 == 0:
                clears(set_to_none)

        optimizer.zero_grad = zero_grad
        return optimizer

    job = job_of(made)
    assert has_own_zero_grad(made(list(nn.Linear(2, 2).parameters())))
    assert_close(train(run_of(job, 1), tmp_path, (1,) * STEPS).weights, literally(job))


def test_what_is_left_is_not_clipped_by_the_job_but_may_be_by_the_optimizer(tmp_path):
    with pytest.raises(JobError, match=r"Every, leaves gradients, and Job\.clip_norm") as caught:
        undividable(job_of(OWN["every second"], clip_norm=0.1), net())
    assert "register_step_pre_hook" in caught.value.hint
    assert undividable(job_of(OWN["to zeros"], clip_norm=0.1), net()) is None

    def clips(weights) -> Optimizer:
        weights = list(weights)
        made = Every(weights, lr=0.1)
        made.register_step_pre_hook(lambda *_: clip_grad_norm_(weights, 0.1) and None)
        return made

    job = job_of(clips)
    assert_close(train(run_of(job, 1), tmp_path, (1,) * STEPS).weights, literally(job))


def test_a_step_that_is_left_out_clears_and_drops_what_was_left():
    parameter = nn.Parameter(torch.ones(2))
    clearing = Clearing(Every([parameter], lr=0.1), {"p": parameter}, clips=False)
    parameter.grad = torch.ones(2)
    clearing.call()
    assert clearing.left["p"].tolist() == [1.0, 1.0]
    assert clearing.added({"p": torch.ones(2)})["p"].tolist() == [2.0, 2.0]
    clearing.leave_out()
    assert (clearing.left, clearing.optimizer.count) == ({}, 2)


def test_zero_grad_of_torch_is_not_one_of_its_own():
    weights = list(nn.Linear(2, 2).parameters())
    kinds = (SGD, torch.optim.AdamW, torch.optim.Adafactor)
    assert not any(has_own_zero_grad(kind(weights, lr=0.1)) for kind in kinds)
