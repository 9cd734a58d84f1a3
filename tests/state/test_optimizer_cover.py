"""What an optimizer does only later: lines that its trial has not reached are found."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.trace import capture
from penstock.job import Job
from penstock.state.optimizer.optimizer import undividable
from penstock.state.optimizer.optimizer_trial import tried


def data(start):
    for index in itertools.count(start):
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Late(torch.optim.SGD):
    """Does something else from a step on."""

    first = 13

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.count = 0

    @property
    def held(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        if self.count > self.first:
            self.change()
        return super().step(closure)

    def change(self):
        torch.nn.utils.clip_grad_norm_(self.held, 0.1)


class OfEach(Late):
    def change(self):
        for parameter in self.held:
            parameter.grad.clamp_(-0.01, 0.01)


class Far(OfEach):
    first = 10_000


class Returns(Late):
    """The rest of a block follows a branch that leaves it."""

    @torch.no_grad()
    def step(self, closure=None):
        self.count = number = self.count + 1
        is_early = number <= self.first
        if is_early:
            return super().step(closure)
        self.change()
        return super().step(closure)


class FarReturns(Returns):
    first = 10_000


class Raises(OfEach):
    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        if self.count > 10_000:
            raise RuntimeError("a loop without an end")
        return super().step(closure)


def by_a_hook(parameters):
    made, count = torch.optim.SGD(parameters, lr=0.1), [0]

    def clip(*_):
        count[0] += 1
        if count[0] == 20:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)

    made.register_step_pre_hook(clip)
    return made


def job_of(optimizer) -> Job:
    return Job(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), square, data, optimizer)


def why(optimizer) -> str | None:
    job = job_of(optimizer)
    return undividable(job, capture(job))


@pytest.mark.parametrize("optimizer", [Late, Returns, by_a_hook], ids=lambda one: one.__name__)
def test_what_looks_across_parameters_late_is_not_divided(optimizer) -> None:
    assert "0.bias" in why(optimizer)


@pytest.mark.parametrize("optimizer", [OfEach, Raises])
def test_what_changes_late_for_each_parameter_by_itself_is_divided(optimizer) -> None:
    assert why(optimizer) is None


@pytest.mark.parametrize("optimizer", [Far, FarReturns])
def test_line_that_no_step_of_a_trial_reaches_is_named(optimizer) -> None:
    words = why(optimizer)
    assert f"{__file__}:" in words
    assert "not reached in 120 steps" in words


def averaging(parameters):
    """Averages hang on the parameters themselves, and take their place now and then."""
    made, count = torch.optim.SGD(parameters, lr=0.1), [0]

    def average(*_):
        count[0] += 1
        with torch.no_grad():
            for one in parameters:
                own = getattr(one, "own", one)
                one.own = 0.8 * own.detach() + 0.2 * one.detach()
                if count[0] % 5 == 0:
                    one.copy_(one.own)

    made.register_step_pre_hook(average)
    return made


def test_what_a_step_hangs_on_a_parameter_is_not_there_in_the_next_trial() -> None:
    assert "remembers" not in (why(averaging) or "")


def test_what_hangs_on_a_parameter_does_not_go_through_a_resume() -> None:
    job = job_of(averaging)
    captured = capture(job)
    names = [name for name, _ in captured.model.named_parameters()]
    assert "not as in an unbroken run" in tried("resumed", job, captured.model, names)
