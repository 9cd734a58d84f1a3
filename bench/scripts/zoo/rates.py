"""Rates and schedules that remember, and what happens between two steps: zero_grad, groups."""

import itertools
import math
import random

import torch
from small import deep, pairs, sgd, squares
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiplicativeLR,
    MultiStepLR,
    PolynomialLR,
)
from torch.optim.swa_utils import SWALR

import penstock as ps

STEPS = {"milestone_at_step_twenty": 26, "early_end_of_training": 20}


def _job(loss=squares, **options) -> ps.Job:
    options = {"optimizer": sgd, "micro_batches": 4, **options}
    return ps.Job(model=deep, loss=loss, data=pairs, **options)


def rate_from_a_generator() -> ps.Job:
    """learning_rate takes the next value of a generator, whatever step it is asked for."""
    rates = (0.9**k for k in itertools.count())
    return _job(learning_rate=lambda step: next(rates))


def rate_that_jitters() -> ps.Job:
    """learning_rate draws from a random.Random of the job."""
    source = random.Random(2)
    return _job(learning_rate=lambda step: 0.5 + source.random())


def rate_that_halves_when_losses_stall() -> ps.Job:
    """The loss leaves its values in a list; the rate is halved when the newest is no smaller."""
    seen, rate = [], [1.0]

    def loss(model, batch):
        found = squares(model, batch)
        seen.append(found.item())
        return found

    def learning_rate(step):
        if len(seen) > 4 and seen[-1] > seen[-5]:
            rate[0] *= 0.8
        return rate[0]

    return _job(loss, learning_rate=learning_rate)


def rate_as_a_tensor() -> ps.Job:
    """learning_rate returns a tensor (nothing is wrong)."""
    rates = torch.linspace(1.0, 0.1, 100)
    return _job(learning_rate=lambda step: rates[step])


def rate_that_goes_by_epochs() -> ps.Job:
    """A function of step // 3, as a table (nothing is wrong)."""
    return _job(learning_rate=lambda step: (1.0, 0.5, 0.2, 0.1)[min(3, step // 3)])


def warm_restarts() -> ps.Job:
    """CosineAnnealingWarmRestarts, begun anew at steps 3 and 9 (nothing is wrong)."""
    return _job(scheduler=lambda o: CosineAnnealingWarmRestarts(o, 3, 2))


def cycles_of_rate_and_momentum() -> ps.Job:
    """CyclicLR, which moves momentum against the rate (nothing is wrong)."""
    return _job(scheduler=lambda o: CyclicLR(o, 0.01, 0.2, 4))


def schedulers_in_a_chain() -> ps.Job:
    """ChainedScheduler of two that multiply (nothing is wrong)."""
    return _job(scheduler=lambda o: ChainedScheduler([ExponentialLR(o, 0.9), PolynomialLR(o, 8)]))


def milestone_at_step_twenty() -> ps.Job:
    """MultiStepLR whose milestone is step 20 (nothing is wrong)."""
    return _job(scheduler=lambda o: MultiStepLR(o, [20], 0.1))


def rate_of_averaging() -> ps.Job:
    """SWALR anneals to the rate of averaging (nothing is wrong)."""
    return _job(scheduler=lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=6))


def factor_of_an_object_with_state() -> ps.Job:
    """LambdaLR with an object that counts its calls, which state_dict would save."""

    class Factor:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, step):
            self.calls += 1
            return 0.9**self.calls

    return _job(scheduler=lambda o: LambdaLR(o, Factor()))


def factor_that_draws() -> ps.Job:
    """MultiplicativeLR whose factor is drawn from random, seeded where it is made."""

    def scheduler(optimizer):
        source = random.Random(8)
        return MultiplicativeLR(optimizer, lambda step: 0.8 + 0.3 * source.random())

    return _job(scheduler=scheduler)


class _Noam(LRScheduler):
    """A scheduler by a stranger, with a state of its own: the best norm so far."""

    def __init__(self, optimizer) -> None:
        self.best = math.inf
        super().__init__(optimizer)

    def get_lr(self):
        rates = [base / math.sqrt(1 + self.last_epoch) for base in self.base_lrs]
        self.best = min(self.best, rates[0])
        return [min(rate, 2 * self.best) for rate in rates]


def scheduler_by_a_stranger() -> ps.Job:
    """A subclass of LRScheduler that keeps the least rate so far (nothing is wrong)."""
    return _job(scheduler=_Noam)


def early_end_of_training() -> ps.Job:
    """The rate is zero from step 14 on, as where training ends early (nothing is wrong)."""
    return _job(learning_rate=lambda step: 0.0 if step >= 14 else 1.0)


def two_groups_of_decay() -> ps.Job:
    """Decay for matrices alone, found by ndim, and a warm-up over both (nothing is wrong)."""

    def optimizer(weights):
        matrices = [p for p in weights if p.ndim > 1]
        others = [p for p in weights if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.0)

    return _job(optimizer=optimizer, learning_rate=lambda step: min(1.0, (step + 1) / 5))


# -- zero_grad ------------------------------------------------------------------------------------


class _Fading(torch.optim.SGD):
    """Keeps half of the gradient for the next step, as gradient momentum by hand."""

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)


def gradients_that_fade() -> ps.Job:
    """zero_grad halves gradients instead of clearing them."""
    return _job(optimizer=lambda w: _Fading(w, lr=0.05))


class _Partly(torch.optim.SGD):
    """Clears the first group only."""

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            p.grad = None


def gradients_of_biases_that_stay() -> ps.Job:
    """zero_grad clears the gradients of matrices; those of biases add up."""

    def optimizer(weights):
        groups = [[p for p in weights if p.ndim > 1], [p for p in weights if p.ndim < 2]]
        return _Partly([{"params": group} for group in groups], lr=0.02)

    return _job(optimizer=optimizer)


class _Late(torch.optim.SGD):
    calls = 0

    def zero_grad(self, set_to_none=True):
        self.calls += 1
        if self.calls < 6 or self.calls % 2:
            super().zero_grad(set_to_none)


def gradients_that_stay_from_step_six() -> ps.Job:
    """zero_grad clears always up to the fifth step, then every second time."""
    return _job(optimizer=lambda w: _Late(w, lr=0.05))


class _Counting(torch.optim.Adam):
    """Sets zeros instead of None, and counts in its group."""

    def zero_grad(self, set_to_none=True):
        group = self.param_groups[0]
        group["cleared"] = group.get("cleared", 0) + 1
        super().zero_grad(set_to_none=False)


def gradients_set_to_zeros() -> ps.Job:
    """zero_grad(set_to_none=False), counted in the group (nothing is wrong)."""
    return _job(optimizer=lambda w: _Counting(w, lr=0.01))
