"""A batch whose tensors are views of one: every way of training sees what the loss writes there."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.graph.trace import capture
from penstock.job import Job
from penstock.prove.plain import Plain
from penstock.prove.prove import Planned, prove, prove_eager
from tests.parity.models import plan_of


def tokens(start: int) -> Iterator[Any]:
    for k in itertools.count(start):
        row = torch.randint(1, 16, (2, 9), generator=torch.Generator().manual_seed(k))
        yield row[:, :-1], row[:, 1:]


def arrays(start: int) -> Iterator[Any]:
    for k in itertools.count(start):
        row = np.random.default_rng(k).integers(1, 16, (2, 9))
        yield {"x": row[:, :-1], "y": row[:, 1:]}


def same(start: int) -> Iterator[Any]:
    return ({"x": x, "y": x} for x, _ in tokens(start))


def net() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16)).double()


def masks(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch.values() if isinstance(batch, dict) else batch
    x[:, ::3] = 0
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def job_of(data: Any) -> Job:
    return Job(net, masks, data, lambda w: torch.optim.SGD(w, lr=0.1), micro_batches=4)


@pytest.mark.parametrize("data", [tokens, arrays, same])
def test_plain_loop_is_what_its_author_writes(data: Any) -> None:
    job, plain = job_of(data), Plain(job_of(data))
    torch.manual_seed(job.seed)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ((torch.as_tensor(x) for x in getattr(b, "values", b.__iter__)()) for b in data(0))
    for step in range(3):
        for x, y in itertools.islice(batches, 4):
            (masks(model, (x, y)) / 4).backward()
        plain.update(step, plain.gradients(step).gradients)
        optimizer.step()
        optimizer.zero_grad()
    weights = plain.weights()
    assert all(torch.equal(weights[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("data", [tokens, arrays, same])
def test_plans_and_eager_replicas_equal_it(data: Any) -> None:
    job = job_of(data)
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    for proof in prove(Planned(job, captured, plan), (0, 3)), prove_eager(job, 2, (0, 3)):
        assert proof.problem == ""
        assert {d.what for d in proof.differences} >= {"data", "loss", "gradients", "update"}
        assert [d for d in proof.differences if d.value > 1e-11] == []
