"""What is not audited: an update that no state gives again, as the optimizer counts elsewhere."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from penstock.choose.update_memory import check_updates, forgets
from penstock.errors import CheckpointError
from penstock.examine.examine import Examined
from penstock.job import Job
from penstock.listener import SILENT
from penstock.training.examination import check_goes_on


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


@pytest.mark.parametrize("hook", COUNTS.values(), ids=COUNTS)
def test_a_run_that_would_begin_it_anew_is_refused_with_the_line_that_keeps_it(hook) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be resumed: (?s:.*)test_forgets\.py:\d+"):
        check_updates(job_of(hooked(hook)))


@pytest.mark.parametrize("asked", [{"resume": Path("step-000002")}, {"elastic": True}])
def test_it_is_refused_by_the_process_that_leads_before_a_rank_begins(asked, tmp_path) -> None:
    job = job_of(hooked(COUNTS["every third step"]))
    care = SimpleNamespace(forget=False)
    session = SimpleNamespace(job=job, key="", care=care, listener=SILENT, folder=tmp_path)
    session.elastic = asked.get("elastic", False)
    with pytest.raises(CheckpointError, match=r"^the job.s optimizer cannot be resumed"):
        check_goes_on(session, Examined(), asked.get("resume"))
    session.care.forget = True
    check_goes_on(session, Examined(), asked.get("resume"))


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
    check_updates(job_of(optimizer))
