"""Rates that change: factors with state, schedulers of torch and transformers, cycles."""

import itertools
import math

import torch
from small import deep, pairs, squares
from torch.optim import lr_scheduler
from transformers import get_linear_schedule_with_warmup

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


def _scheduled(scheduler, optimizer=None) -> ps.Job:
    return _job(optimizer, scheduler=scheduler)


def cosine_of_torch() -> ps.Job:
    """torch's cosine as Job.scheduler."""
    return _scheduled(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10))


def linear_of_transformers() -> ps.Job:
    """The linear schedule with warm-up of transformers."""
    return _scheduled(lambda optimizer: get_linear_schedule_with_warmup(optimizer, 3, 12))


def one_cycle_of_torch() -> ps.Job:
    """OneCycleLR, which moves rate and momentum."""
    return _scheduled(lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12))


def schedules_in_sequence() -> ps.Job:
    """A warm-up, then steps, as SequentialLR, on two groups by name."""

    def optimizer(weights):
        rows = list(weights.named())
        biases = {"params": [p for n, p in rows if n.endswith("bias")], "lr": 0.02}
        return torch.optim.SGD([biases, {"params": [p for n, p in rows if n.endswith("t")]}], 0.2)

    def scheduler(optimizer):
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
            lr_scheduler.StepLR(optimizer, 2, 0.5),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [4])

    return _scheduled(scheduler, optimizer)


def rates_by_a_function_for_each_group() -> ps.Job:
    """LambdaLR with a function for each of two groups."""

    def optimizer(weights):
        weights = list(weights)
        return torch.optim.SGD([{"params": weights[:3]}, {"params": weights[3:]}], lr=0.2)

    return _scheduled(
        lambda made: lr_scheduler.LambdaLR(made, [lambda t: 0.8**t, lambda t: 1 / (1 + t)]),
        optimizer,
    )


def plateau() -> ps.Job:
    """ReduceLROnPlateau wants a metric, which no such loop gives it."""
    return _scheduled(lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer))


class _Inverse(lr_scheduler.LRScheduler):
    """A scheduler of one's own, that looks at the state of the optimizer."""

    def get_lr(self):
        norms = [s["momentum_buffer"].norm().item() for s in self.optimizer.state.values()]
        return [base / (1 + sum(norms)) for base in self.base_lrs]


def scheduler_that_reads_the_optimizer() -> ps.Job:
    """A scheduler whose rate is a function of all the momentum there is."""
    return _scheduled(_Inverse)
