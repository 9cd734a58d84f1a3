"""An optimizer that keeps something in the job's own variables is trained by replicas."""

import random
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import penstock as ps
from penstock.choose.settle import CheckOptions, examined
from penstock.examine.examine import examine
from penstock.graph.trace import build_model
from penstock.listener import SILENT
from penstock.prove.prove import prove_eager
from penstock.runtime.launch import run_processes
from penstock.state.optimizer.optimizer import remembers

D = 4


def noise_of_a_closure():
    source = torch.Generator().manual_seed(3)

    def optimizer(weights) -> Optimizer:
        made, weights = SGD(weights, lr=0.1), list(weights)

        def hook(*_: object) -> None:
            for weight in weights:
                weight.grad.add_(torch.randn(weight.shape, generator=source), alpha=0.01)

        made.register_step_pre_hook(hook)
        return made

    return optimizer


def a_counter():
    calls = [0]

    class Slower(SGD):
        def step(self, closure=None):
            calls[0] += 1
            self.param_groups[0]["lr"] = 0.1 / calls[0]
            super().step(closure)

    return lambda weights: Slower(weights, lr=0.1)


def noise_of_a_class():
    class Langevin(SGD):
        source = np.random.default_rng(0)

        def step(self, closure=None):
            super().step(closure)
            with torch.no_grad():
                for weight in self.param_groups[0]["params"]:
                    weight.add_(float(self.source.standard_normal()), alpha=0.01)

    return lambda weights: Langevin(weights, lr=0.1)


def chance_of_its_own():
    def optimizer(weights) -> Optimizer:
        made, source = SGD(weights, lr=0.1), random.Random(0)

        def hook(*_: object) -> None:
            made.param_groups[0]["lr"] = 0.1 * source.random()

        made.register_step_pre_hook(hook)
        return made

    return optimizer


def job_of(optimizer) -> ps.Job:
    def data(start: int):
        for number in count(start):
            yield torch.randn(2, D, generator=torch.Generator().manual_seed(number))

    model = lambda: nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))  # noqa: E731
    return ps.Job(model, lambda net, x: net(x).square().mean(), data, optimizer, micro_batches=4)


@pytest.mark.parametrize("made", [noise_of_a_closure, a_counter, noise_of_a_class])
@pytest.mark.sampled(2)
def test_what_the_optimizer_remembers_in_the_job_leaves_replicas(made):
    job = job_of(made())
    found = examine(job)
    assert (found.one_process, found.failed) == ("", "")
    assert found.no_plan.startswith("the job's optimizer remembers something outside itself: ")


def test_replicas_remember_alike():
    proof = prove_eager(job_of(noise_of_a_closure()), 2, (0, 2), launcher=run_processes)
    assert proof.problem == ""


def test_what_it_makes_for_itself_is_nothing_remembered():
    job = job_of(chance_of_its_own())
    assert remembers(job, build_model(job)) is None
    assert examine(job).no_plan == ""


def test_a_generator_that_the_job_names_is_nothing_remembered():
    source = random.Random(0)

    def optimizer(weights) -> Optimizer:
        made = SGD(weights, lr=0.1)

        def hook(*_: object) -> None:
            made.param_groups[0]["lr"] = 0.1 * source.random()

        made.register_step_pre_hook(hook)
        return made

    job = ps.Job(**{**vars_of(job_of(optimizer)), "state": {"source": source}})
    assert remembers(job, build_model(job)) is None


def vars_of(job: ps.Job) -> dict[str, object]:
    names = "model", "loss", "data", "optimizer", "micro_batches"
    return {name: getattr(job, name) for name in names}


def test_who_wants_a_plan_is_told_what_to_mend():
    with pytest.raises(ps.PenstockError, match="no plan can be made: the job's optimizer") as told:
        examined(job_of(a_counter()), "", CheckOptions(strict=True), SILENT)
    assert told.value.hint.startswith("create what it remembers, and what it draws from, where")
