"""Rates that change: factors with state, schedulers of torch and transformers, cycles."""

import itertools
import math

import torch
from small import deep, pairs, squares
from torch.optim import lr_scheduler

import penstock as ps


def _job(optimizer=None, **options) -> ps.Job:
    optimizer = optimizer or (lambda weights: torch.optim.SGD(weights, lr=0.2, momentum=0.9))
    return ps.Job(
        model=deep, loss=squares, data=pairs, optimizer=optimizer, micro_batches=4, **options
    )


def warm_up_and_cosine() -> ps.Job:
    """A factor of the step: warm-up, then a cosine (nothing is wrong)."""

    def rate(step):
        return (step + 1) / 3 if step < 3 else 0.5 + 0.5 * math.cos(math.pi * (step - 3) / 7)

    return _job(learning_rate=rate)


def factor_that_counts_its_calls() -> ps.Job:
    """A closure that lowers the factor by its own count of calls, not by the step."""
    calls = itertools.count()
    return _job(learning_rate=lambda step: 0.9 ** next(calls))


def factor_by_a_scheduler_of_its_own() -> ps.Job:
    """learning_rate steps a scheduler of torch on a dummy optimizer and reads its rate."""
    dummy = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.StepLR(dummy, 2, 0.5)

    def rate(step):
        found = scheduler.get_last_lr()[0]
        dummy.step()
        scheduler.step()
        return found

    return _job(learning_rate=rate)


def scheduler_in_a_step_hook() -> ps.Job:
    """torch's own cosine scheduler, stepped by a hook after every step of the optimizer."""

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.2)
        scheduler = lr_scheduler.CosineAnnealingLR(made, 10)
        made.register_step_post_hook(lambda *_: scheduler.step())
        return made

    return _job(optimizer)


def one_cycle_with_momentum() -> ps.Job:
    """OneCycleLR in a hook: it moves the momentum too."""

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.2, momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(made, 0.3, total_steps=12)
        made.register_step_post_hook(lambda *_: scheduler.step())
        return made

    return _job(optimizer)


class _Momentum(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["momentum"] = min(0.95, group["momentum"] + 0.03)
        return super().step(closure)


def momentum_that_grows() -> ps.Job:
    """Every step raises the momentum in the groups, beside a factor on the rate."""
    return _job(
        lambda weights: _Momentum(weights, lr=0.1, momentum=0.5),
        learning_rate=lambda step: 0.9**step,
    )


def rates_of_groups_apart() -> ps.Job:
    """Two groups with rates of their own under one factor (nothing is wrong)."""

    def optimizer(weights):
        weights = list(weights)
        matrices = {"params": [p for p in weights if p.ndim > 1], "lr": 0.2}
        return torch.optim.SGD([matrices, {"params": [p for p in weights if p.ndim < 2]}], lr=0.02)

    return _job(optimizer, learning_rate=lambda step: 1 / (1 + step))


def groups_that_are_added_later() -> ps.Job:
    """A hook adds the last parameters as a group of their own at the third step."""

    def optimizer(weights):
        weights = list(weights)
        late = weights[-2:]
        made = torch.optim.SGD(weights[:-2], lr=0.1)
        counts = itertools.count()

        def add(*_):
            if next(counts) == 3:
                made.add_param_group({"params": late})

        made.register_step_post_hook(add)
        return made

    return _job(optimizer)
