"""Pace: how the rate of a job follows the batch, where a run changes it.

A step with another batch is worth `gain` steps of the job's own (profile/noise.py), so

    the job's own step t of a run     the sum of the gains of the steps before
    its rate                          what `learning_rate` or `scheduler` says of step floor(t),
                                      times gain ** exponent

The exponent is 1 where an update grows with the gradient (SGD), as AdaScale has it, and 1/2 where
it does not (Adam and the like divide by the size of the gradient): there noise shrinks the update
of a small batch already by the root.  Which one it is, is tried.

Source:   AdaScale, arXiv:2007.05105; "An Empirical Model of Large-Batch Training",
          arXiv:1812.06162, section 2.2 and appendix; "On the SDEs and Scaling Rules for Adaptive
          Gradient Algorithms", arXiv:2205.10287 (the root).
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import PenstockError
from penstock.graph.whole_optimizer import whole_optimizer
from penstock.job import Job

_APART, _LARGE = 10.0, 100.0  # of updates by gradients that are so many times as large


class Stretch(NamedTuple):
    """Steps with one batch, from `step` on, before which the job's own `own` steps were done."""

    step: int
    own: float
    gain: float = 1.0
    factor: float = 1.0


def own_step(stretches: Sequence[Stretch], step: int) -> float:
    """Return the job's own step that a step of the run begins with."""
    at = _at(stretches, step)
    return at.own + (step - at.step) * at.gain


def _at(stretches: Sequence[Stretch], step: int) -> Stretch:
    return stretches[max(0, bisect_right(stretches, step, key=lambda one: one.step) - 1)]


def _whole(own: float) -> int:
    return math.floor(own + 1e-9)


def paced(job: Job, stretches: Sequence[Stretch]) -> Job:
    """Return a job whose rates follow the stretches of a run; as it is where nothing changes."""
    told = tuple(stretches)
    if all((one.gain, one.factor) == (1.0, 1.0) for one in told):
        return job
    if job.scheduler is not None:
        return replace(job, scheduler=_SchedulerOf(job.scheduler, told))
    return replace(job, learning_rate=_RateOf(job.learning_rate, told))


@final
@dataclass(frozen=True, slots=True)
class _RateOf:
    """The factor on the optimizer's rate in a step of the run."""

    rate: Callable[[int], float] | None
    stretches: tuple[Stretch, ...]

    def __call__(self, step: int) -> float:
        own = 1.0 if self.rate is None else float(self.rate(_whole(own_step(self.stretches, step))))
        return own * _at(self.stretches, step).factor


@final
@dataclass(frozen=True, slots=True)
class _SchedulerOf:
    """Makes the job's scheduler, stepped as the job's own steps are done."""

    make: Callable[[Optimizer], Any]
    stretches: tuple[Stretch, ...]

    def __call__(self, optimizer: Optimizer) -> Any:
        return PacedScheduler(self.make(optimizer), optimizer, self.stretches)


@final
class PacedScheduler:
    """A scheduler that is stepped as often as the job's own steps; its rates times a factor."""

    def __init__(self, inner: Any, optimizer: Optimizer, stretches: Sequence[Stretch]) -> None:
        self.inner, self.optimizer, self.stretches = inner, optimizer, stretches
        self._schedulers = (inner,)  # as torch's own, that hold others, name them
        self._step, self._done = 0, 0
        self._show()

    def step(self) -> None:
        """Go on to the next step of the run."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate
        self._step += 1
        until = _whole(own_step(self.stretches, self._step))
        for _ in range(until - self._done):
            self.inner.step()
        self._done = max(until, self._done)
        self._show()

    def _show(self) -> None:
        factor = _at(self.stretches, self._step).factor
        self._rates = [group["lr"] for group in self.optimizer.param_groups]
        if factor != 1.0:
            for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor


def exponent(job: Job, model: nn.Module) -> float | None:
    """Return the power of the gain by which a job's rate follows the batch.

    None where a group of its optimizer has no rate, or it cannot be tried.
    A first step from zeros by gradients, and by a hundred times these, is compared.
    """
    whole = whole_optimizer(job, model)
    if any("lr" not in group for group in whole.optimizer.param_groups):
        return None
    try:
        small, large = (_moved(job, model, size) for size in (1.0, _LARGE))
    except PenstockError:
        return None
    return 0.5 if large < _APART * small else 1.0


def _moved(job: Job, model: nn.Module, size: float) -> float:
    """Return the norm of the first update from zeros, by gradients of a size."""
    whole = whole_optimizer(job, model)
    held = list(whole.parameters.values())
    before, source = [p.data for p in held], torch.Generator().manual_seed(0)
    try:
        for p in held:
            drawn = torch.randn(p.shape, generator=source).to(p.device, p.dtype)
            p.data, p.grad = torch.zeros_like(p), drawn * size * 1e-2 if p.requires_grad else None
        try:
            whole.optimizer.step()
        except Exception as problem:  # whatever the job's code raises
            raise PenstockError(str(problem)) from problem
        return math.sqrt(sum(float(p.data.double().square().sum()) for p in held))
    finally:
        for p, value in zip(held, before, strict=True):
            p.data, p.grad = value, None
