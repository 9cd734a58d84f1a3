"""What is not audited: an update that no state gives again, as the optimizer counts elsewhere."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from penstock.job import Job
from penstock.training.audited_run import forgets


def job_of(optimizer: Callable[..., Optimizer]) -> Job:
    return Job(
        model=lambda: nn.Linear(2, 2),
        loss=lambda model, x: model(x).square().mean(),
        data=lambda start: iter([torch.ones(1, 2)] * 8),
        optimizer=optimizer,
    )


def hooked(hook: Callable[[Optimizer, int], None]) -> Callable[..., Optimizer]:
    def optimizer(weights: list[nn.Parameter]) -> Optimizer:
        made, numbers = torch.optim.SGD(weights, lr=0.1), itertools.count(1)
        made.register_step_pre_hook(lambda own, *_: hook(own, next(numbers)))
        return made

    return optimizer


def scaled(optimizer: Optimizer, factor: float) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad.mul_(factor)


def scaled_by_its_group(optimizer: Optimizer, number: int) -> None:
    group = optimizer.param_groups[0]
    group["calls"] = group.get("calls", 0) + 1
    scaled(optimizer, 1 / group["calls"])


COUNTS = {
    "as momentum of a teacher": lambda own, number: scaled(own, 0.9**number),
    "every third step": lambda own, number: scaled(own, 0.0 if number % 3 == 0 else 1.0),
    "from the fourth on": lambda own, number: scaled(own, 0.5 if number > 3 else 1.0),
}


@pytest.mark.parametrize("hook", COUNTS.values(), ids=COUNTS)
def test_a_hook_that_counts_its_calls_is_not_audited_and_the_words_say_why(hook) -> None:
    assert "keeps something in no checkpoint" in forgets(job_of(hooked(hook)))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda weights: torch.optim.AdamW(weights, lr=0.1),
        hooked(lambda own, number: scaled(own, 0.5)),
        hooked(scaled_by_its_group),
    ],
    ids=["torch's own", "a hook of gradients alone", "a count in its group"],
)
def test_what_a_checkpoint_holds_is_audited(optimizer) -> None:
    assert forgets(job_of(optimizer)) == ""
