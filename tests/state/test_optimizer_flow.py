"""What an optimizer makes of several parameters is found, though no weight shows it yet."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from penstock import _compat
from penstock.graph.trace import capture
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job
from penstock.state.optimizer.optimizer import undividable


def data(start: int):
    while True:
        yield torch.ones(2, 4) * (start + 1)
        start += 1


def job_of(kind: Callable[..., Optimizer]) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)),
        loss=lambda model, x: model(x).square().mean(),
        data=data,
        optimizer=lambda weights: kind(weights, lr=0.1),
        micro_batches=2,
    )


def reason(kind: Callable[..., Optimizer]) -> str | None:
    job = job_of(kind)
    return undividable(job, capture(job))


def grads(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]


class SkipsJumps(SGD):
    """Leaves a step out whose norm is far above those before it: in a trial none need be."""

    usual = 1e6

    def step(self, closure=None):
        norm = torch.stack([g.norm() for g in grads(self)]).norm().item()
        if norm < 10 * self.usual:
            super().step()


class SkipsBySelection(SGD):
    """The same without a look: what is left out is a factor of every update."""

    def step(self, closure=None):
        norm = torch.stack([g.norm() for g in grads(self)]).norm()
        for gradient in grads(self):
            gradient.mul_(torch.where(norm < 1e9, 1.0, 0.0))
        super().step()


class SumsInPython(SGD):
    """Compares a sum that Python makes with the one before it."""

    before = None

    def step(self, closure=None):
        now = sum(g.norm().item() for g in grads(self))
        if self.before is None or now < 1.15 * self.before:
            super().step()
        self.before = now


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SkipsJumps, "a number of 0.bias and 3 more together is read at .*norm"),
        (SkipsBySelection, "0.weight depends on 0.bias and 2 more"),
        (SumsInPython, "depends on other parameters"),
    ],
)
def test_a_norm_of_all_that_matters_late_keeps_an_optimizer_whole(kind, words) -> None:
    assert re.search(words, reason(kind) or "")


class Trusts(SGD):
    """LARS: of each parameter by itself two norms are looked at."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.norm() > 0 and p.grad.norm() > 0:
                    p.grad.mul_(p.norm() / p.grad.norm())
        super().step()


class Assigns(SGD):
    """Puts new tensors in the place of the old."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - 0.1 * p.grad


class Fused(Adam):
    def __init__(self, weights, lr):
        super().__init__(weights, lr=lr, fused=True)


class Foreach(Adam):
    def __init__(self, weights, lr):
        super().__init__(weights, lr=lr, foreach=True)


@pytest.mark.parametrize("kind", [Trusts, Assigns, Fused, Foreach])
def test_what_looks_at_one_parameter_after_the_other_is_divided(kind) -> None:
    assert reason(kind) is None


class Wraps(Optimizer):
    """Lookahead as it is passed on: no `Optimizer.__init__`, so torch has given it no hooks."""

    def __init__(self, weights, lr):
        self.base, self.count = SGD(weights, lr=lr), 0
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.slow = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, s in zip(group["params"], slow, strict=True) if self.count % 2 == 0 else ():
                s.lerp_(p, 0.5)
                p.copy_(s)

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)


def test_an_optimizer_around_another_has_hooks_as_any() -> None:
    calls: list[int] = []
    job = job_of(Wraps)
    whole = whole_optimizer(job, job.model())
    end = _compat.call_first(whole.optimizer, lambda *_: calls.append(1))
    for p in whole.parameters.values():
        p.grad = torch.ones_like(p)
    whole.optimizer.step()
    end()
    whole.optimizer.step()
    assert calls == [1]
    assert _compat.pre_hooks(whole.optimizer) == []


class CellsOfSteps(SGD):
    """Keeps what it has computed for a step in a list of its groups, as AdaBelief does."""

    def __init__(self, weights, lr):
        self.cells = [None, None]
        super().__init__(weights, lr)
        self.param_groups[0]["cells"], self.count = self.cells, 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            if group.get("cells", self.cells)[self.count % 2] != self.count:
                group.get("cells", self.cells)[self.count % 2] = self.count
        super().step(closure)


class ListOfSteps(SGD):
    """Notes each step."""

    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.steps = []

    def step(self, closure=None):
        self.steps.append(len(self.steps))
        super().step(closure)


class DictOfSteps(ListOfSteps):
    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.steps = {}

    def step(self, closure=None):
        self.steps[len(self.steps)] = 1
        SGD.step(self, closure)


class CountsSteps(ListOfSteps):
    def __init__(self, weights, lr):
        super().__init__(weights, lr)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        SGD.step(self, closure)


class KeepsAnObject(CountsSteps):
    """No checkpoint could have it, whole or in parts."""

    def step(self, closure=None):
        self.kept = object
        super().step(closure)


@pytest.mark.parametrize(("kind", "name"), [(CellsOfSteps, "cells"), (ListOfSteps, "steps")])
def test_list_that_no_part_has_all_of_keeps_the_optimizer_whole(kind, name):
    assert re.fullmatch(rf"its {name}, a list, changes, and no part has all of it", reason(kind))


def test_dict_that_no_part_has_all_of_keeps_the_optimizer_whole():
    assert reason(DictOfSteps) == "its steps, a dict, changes, and no part has all of it"


@pytest.mark.parametrize("kind", [CountsSteps, KeepsAnObject])
def test_what_parts_keep_as_the_whole_does_may_be_divided(kind):
    assert reason(kind) is None
