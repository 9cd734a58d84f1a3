"""Optimizers as people write them: a plan trains as the plain loop, or says no."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from penstock.errors import JobError, RunError
from penstock.graph.trace import capture
from penstock.runtime.launch import run_processes, run_threads
from penstock.state.optimizer.optimizer import undividable
from tests.parity.optimizing import (
    APART,
    STEPS,
    TOGETHER,
    Clips,
    Custom,
    Net,
    Noisy,
    Skips,
    assert_as_plain,
    job_of,
    net,
    plain_loop,
    run_of,
)
from tests.parity.training import differing, train


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", APART)
def test_what_belongs_to_a_parameter_follows_it(name, stages, tmp_path):
    assert_as_plain(job_of(APART[name]), tmp_path, stages)
    assert undividable(job_of(APART[name]), net()) is None


@pytest.mark.parametrize("name", TOGETHER)
def test_what_looks_across_parameters_runs_whole_on_one_stage(name, tmp_path):
    assert_as_plain(job_of(TOGETHER[name]), tmp_path, 1)


OF_ITS_OWN = "counting", "schedules_itself", "patched"  # each stage has an object, and its closures


@pytest.mark.parametrize("name", OF_ITS_OWN)
def test_what_closures_share_is_made_for_each_stage(name, tmp_path):
    assert undividable(job_of(TOGETHER[name]), net()) is None
    assert_as_plain(job_of(TOGETHER[name]), tmp_path, 3)


@pytest.mark.parametrize("name", [*sorted(TOGETHER.keys() - set(OF_ITS_OWN)), "skips", "noisy"])
def test_what_looks_across_parameters_is_refused_on_more(name, tmp_path):
    optimizer = {**TOGETHER, "skips": Skips, "noisy": Noisy}[name]
    job = job_of(optimizer)
    reason = undividable(job, net())
    assert reason is not None
    with pytest.raises(RunError, match="cannot be divided by stages") as caught:
        train(run_of(job, 2), tmp_path)
    assert reason in str(caught.value)
    assert "stages=1" in caught.value.hint


def test_the_reason_names_the_parameter_the_step_and_the_line(tmp_path):
    assert undividable(job_of(Clips), net()) == "first.weight depends on first.bias and 8 more"
    assert "when one gradient is not finite" in undividable(job_of(Skips), net())

    class Looks(Custom):
        def step(self, closure=None):
            assert len([p for g in self.param_groups for p in g["params"]]) > 1, "where is it?"

    assert "where is it?" in undividable(job_of(Looks), net())


def test_optimizer_that_writes_a_buffer_stays_whole():
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(Net())
        built[-1].register_buffer("tau", torch.ones(()))
        return built[-1]

    def optimizer(weights) -> Optimizer:
        made = torch.optim.SGD(weights, lr=0.1)
        made.register_step_post_hook(lambda *_: built[-1].tau.fill_(2.0) and None)
        return made

    job = job_of(optimizer, model)
    assert undividable(job, capture(job)) == "tau depends on other parameters (step 0)"
    assert all(float(net.tau) == 1.0 for net in built)


def test_torchs_own_are_not_tried(monkeypatch):
    monkeypatch.setattr("penstock.state.optimizer.optimizer_trial._Trial", None)
    assert undividable(job_of(AdamW), net()) is None
    with pytest.raises(TypeError):  # a trial is made once for a function: this one is new
        undividable(job_of(partial(Custom)), net())


@pytest.mark.parametrize("name", ["one_norm", "noisy"])
def test_replicas_each_run_the_whole_optimizer(name, tmp_path):
    """And all draw the same numbers, which are those of one rank."""
    job = job_of({**TOGETHER, "noisy": Noisy}[name])
    several = train(run_of(job, 1, replicas=2), tmp_path / "2", launcher=run_processes)
    alone = train(run_of(job, 1), tmp_path / "1")
    for key, value in alone.weights.items():
        assert torch.allclose(several.weights[key], value, atol=1e-5), key


@pytest.mark.parametrize("name", ["hooked", "moments", "one_norm"])
def test_in_processes_too(name, tmp_path):
    stages = 1 if name in TOGETHER else 2
    assert_as_plain(job_of({**APART, **TOGETHER}[name]), tmp_path, stages, run_processes)


# -- which model ----------------------------------------------------------------------------------


def closing_over(kept: dict, job_model) -> Callable[..., Optimizer]:
    """An optimizer that takes the parameters of a model that it knows of itself."""

    def make(weights) -> Optimizer:
        model = job_model() if callable(job_model) else kept["model"]
        made = SGD(model.layers.parameters(), lr=0.1, momentum=0.9)

        def clip(*_: object) -> None:
            clip_grad_norm_(model.layers.parameters(), 0.1)

        made.register_step_pre_hook(clip)
        return made

    return make


def test_an_optimizer_may_close_over_the_instance_that_is_always_the_same(tmp_path):
    made = Net()
    first = {name: value.clone() for name, value in made.state_dict().items()}
    job = job_of(closing_over({}, lambda: made), lambda: made)
    found = train(run_of(job, 1), tmp_path, (1,) * STEPS).weights
    assert all(torch.equal(value, first[name]) for name, value in made.state_dict().items())
    assert differing(found, plain_loop(job).weights) == []


@pytest.mark.parametrize("launcher", [run_threads, run_processes])
def test_an_optimizer_may_close_over_the_model_that_was_built_last(launcher, tmp_path):
    kept = {}

    def build() -> nn.Module:
        kept["model"] = Net()
        return kept["model"]

    job = job_of(closing_over(kept, None), build)
    found = train(run_of(job, 1), tmp_path, (1,) * STEPS, launcher).weights
    assert differing(found, plain_loop(job).weights) == []


def test_an_optimizer_of_another_instance_is_refused():
    job = job_of(lambda weights: SGD(other.parameters(), lr=0.1))
    other = Net()
    with pytest.raises(JobError, match="holds 14 parameters that are not among those it was given"):
        undividable(job, net())


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda weights: torch.optim.LBFGS(weights), "LBFGS, computes the loss anew with a clos"),
        (lambda weights: Asks(weights, lr=0.1), "Asks, is to be given loss"),
        (lambda weights: "sgd", "the job's optimizer is a str"),
        (lambda weights: SGD(weights, lr=-1), r"fails at .*test_optimizers.py:\d+"),
        (lambda weights: hooks_a_gradient(weights), "puts a hook on the gradient of first.weight"),
    ],
)
def test_what_cannot_be_an_optimizer_here_is_told(optimizer, words):
    with pytest.raises(JobError, match=words):
        undividable(job_of(optimizer), capture(job_of(SGD)))  # one of its own: some leave a hook


class Asks(SGD):
    def step(self, loss, closure=None):
        super().step(closure)


def hooks_a_gradient(weights) -> Optimizer:
    weights[0].register_post_accumulate_grad_hook(lambda p: None)
    return SGD(weights, lr=0.1)


def test_an_optimizer_that_remembers_in_the_job_is_told():
    calls = [0]

    class Remembers(Custom):
        def step(self, closure=None):
            calls[0] += 1
            self.param_groups[0]["lr"] = 0.1 / calls[0]
            super().step(closure)

    with pytest.raises(JobError, match=r"remembers something outside itself: first\.weight"):
        undividable(job_of(Remembers), net())


@pytest.mark.parametrize("steps", [3, 7])
def test_a_schedule_that_ends_is_no_reason(steps):
    def ending(weights) -> Optimizer:
        made = SGD(weights, lr=0.1, momentum=0.9)
        schedule = OneCycleLR(made, 0.1, total_steps=steps)

        def after(*_: object) -> None:
            schedule.step()

        made.register_step_post_hook(after)
        return made

    assert undividable(job_of(ending), net()) is None
    job = job_of(Custom, scheduler=lambda optimizer: LinearEnds(optimizer, steps))
    assert undividable(job, net()) is None


class LinearEnds(LRScheduler):
    def __init__(self, optimizer: Optimizer, steps: int) -> None:
        self.steps = steps
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch >= self.steps:
            raise ValueError("it is at its end")
        return [
            group["initial_lr"] / (1 + self.last_epoch) for group in self.optimizer.param_groups
        ]


def test_a_step_that_fails_is_told_with_its_line(tmp_path):
    class Fails(Custom):
        def change(self, p, group):
            raise ValueError("no more")

    with pytest.raises(
        RunError, match=r"a step of the job's optimizer fails at .*no more"
    ) as caught:
        train(run_of(job_of(Fails), 1), tmp_path)
    assert "does it run without Penstock?" in caught.value.hint
