"""Sliced: where memory is short a search cuts huge parameters, and what it finds fits."""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.choose.choose import Machines, SearchAim, best
from penstock.cluster import Cluster
from penstock.errors import PlanError
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile.measure import measure
from penstock.prove.prove import Planned, prove
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import Task, work
from penstock.search import Fixed
from tests.parity.training import listed

ROWS, WIDTH = 2048, 32
ONE = 4 * ROWS * WIDTH  # bytes of the embedding, or of the head


def job_of(optimizer=torch.optim.AdamW) -> Job:
    def make() -> nn.Module:
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
        head = nn.Linear(WIDTH, ROWS, bias=False)
        return nn.Sequential(nn.Embedding(ROWS, WIDTH), *blocks, head)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    def data(start: int):
        while True:
            generator = torch.Generator().manual_seed(start)
            yield torch.randint(ROWS, (1, 4), generator=generator)
            start += 1

    return Job(
        model=make, loss=loss, data=data, optimizer=lambda p: optimizer(p, 1e-3), micro_batches=1
    )


def machines(memory: int) -> Machines:
    def profiled(captured, job, cluster, listener):
        return (replace(measure(captured, job), kind=""),)

    return Machines(Cluster.here(1).within(memory), profiled)


@cache
def found_in(memory: int):
    job = job_of()
    return best(job, Fixed(ranks=1), capture(job), machines(memory))


def test_a_model_with_one_tensor_larger_than_the_memory_is_planned_and_trains_within_it():
    cap = ONE - 2**14
    choice = found_in(cap).choice
    plan = choice.plan
    assert {name for name, _ in plan.terms.split} == {"0.weight", "3.weight"}
    (told,) = [each for each in plan.decisions if each.what == "split"]
    assert (told.by, told.value.count("256 KiB")) == ("search", 2)
    assert told.why.startswith("whole, no plan is possible: rank 0 would hold")
    assert not prove(Planned(choice.job, choice.captured, plan), (0, 1)).problem
    program = lower_plan(plan, choice.captured.graph)
    stages, windows = stages_of(plan, choice.captured.graph), listed([(program, 0), (program, 1)])
    task = Task(choice.captured, stages, choice.job, windows, memory_window=1)
    (result,) = run_processes(partial(work, task), 1, lambda step: None)
    assert plan.predicted is not None
    assert result.peak_bytes <= cap
    assert result.peak_bytes == pytest.approx(plan.predicted.peak_bytes[0], rel=0.01)


def test_nothing_is_split_where_there_is_memory_or_an_optimizer_that_looks_across():
    assert not found_in(64 * ONE).choice.plan.terms.split
    job = job_of(torch.optim.Adafactor)
    with pytest.raises(PlanError, match="no plan is possible"):
        best(job, Fixed(ranks=1), capture(job), machines(ONE - 2**14))
    job = job_of()
    with pytest.raises(PlanError, match="no plan"):
        best(job, Fixed(ranks=1, stages=1), capture(job), machines(ONE), SearchAim("time"))
