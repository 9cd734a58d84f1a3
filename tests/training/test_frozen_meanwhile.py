"""Who rests when a checkpoint is written keeps its momentum: it learns again after a resume."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.checkpoints import checkpoint
from penstock.job import Job

STEPS, MICRO_BATCHES = 9, 2
REST = range(2, 6)  # steps in which the first layer does not learn


def batches(start: int):
    for number in itertools.count(start):
        source = torch.Generator().manual_seed(number)
        yield torch.randn(3, 4, generator=source), torch.randn(3, 2, generator=source)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def loss(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def adam(weights):
    return torch.optim.Adam(weights, lr=1e-2)


def by_rate() -> Job:
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(net())
        return built[-1]

    def rate(step: int) -> float:
        built[-1][0].requires_grad_(step not in REST)
        return 1.0

    about = {"micro_batches": MICRO_BATCHES, "learning_rate": rate}
    return Job(model, loss, batches, adam, **about)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.net[0].requires_grad_(int(self.calls) // MICRO_BATCHES not in REST)
        self.calls += 1
        return self.net(x)


def by_forward() -> Job:
    return Job(Counts, loss, batches, adam, micro_batches=MICRO_BATCHES)


def by_hand(job: Job) -> dict[str, torch.Tensor]:
    """The author's loop, with nothing between its steps."""
    torch.manual_seed(0)
    model = job.model()
    optimizer, data = adam(model.parameters()), batches(0)
    for step in range(STEPS):
        for _ in range(MICRO_BATCHES):
            (loss(model, next(data)) / MICRO_BATCHES).backward()
        if job.learning_rate is not None:
            job.learning_rate(step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("make", [by_rate, by_forward])
def test_a_resume_while_it_rests_is_no_new_beginning(make, tmp_path):
    wanted = by_hand(make())
    ps.train(make(), num_steps=4, ranks=2, out=tmp_path)
    ps.train(make(), num_steps=STEPS, ranks=2, out=tmp_path, resume=True)
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    found = checkpoint.load(newest).tensors
    assert all(torch.equal(found[f"weights/{name}"], value) for name, value in wanted.items())
