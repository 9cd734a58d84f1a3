"""What a job's code keeps past the module - a list of weights, a dict of buffers - is the run's."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.graph.trace import build, capture, loss_of
from penstock.prove.prove import Planned, prove
from tests.graph.joined.joining import run
from tests.parity.models import plan_of

D = 6


class Net(nn.Module):
    """Two layers and a mean; what else there is of them is told by `past`."""

    def __init__(self, past: dict[str, object]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))
        past["weights"] = list(self.parameters())
        past["mean"] = {"of": self.mean}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def penalized(model: nn.Module, x: Tensor, past) -> Tensor:
    return model(x).square().mean() + sum(w.square().sum() for w in past["weights"])


def penalized_stacked(model: nn.Module, x: Tensor, past) -> Tensor:
    weights = [w for w in past["weights"] if w.dim() == 2]
    return model(x).square().mean() + torch.stack(weights).square().mean()


def of_one_layer_twice(model: nn.Module, x: Tensor, past) -> Tensor:
    return (model(x) @ past["weights"][0].T).square().mean()


def less_the_mean(model: nn.Module, x: Tensor, past) -> Tensor:
    with torch.no_grad():
        past["mean"]["of"].mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (model(x) - past["mean"]["of"]).square().mean()


LOSSES = (penalized, penalized_stacked, of_one_layer_twice, less_the_mean)


def job_of(loss) -> ps.Job:
    past: dict[str, object] = {}

    def data(start: int):
        for number in itertools.count(start):
            yield torch.randn(4, D, generator=torch.Generator().manual_seed(number))

    return ps.Job(
        lambda: Net(past),
        lambda model, x: loss(model, x, past),
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.01),
        micro_batches=4,
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_kept_past_the_module_is_that_of_the_run(loss):
    job = job_of(loss)
    captured = capture(job)
    assert not captured.constants
    model, batch = build(job)
    with torch.no_grad():
        for own, traced in zip(model.parameters(), captured.model.parameters(), strict=True):
            own.mul_(1.5)
            traced.mul_(1.5)
    loss_of(job, model, batch).backward()
    _, found, _ = run(captured, batch)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize("loss", LOSSES)
def test_plan_equals_the_plain_loop(loss):
    job = job_of(loss)
    captured = capture(job)
    replicas = 1 if loss is less_the_mean else 2
    plan = plan_of(captured.graph, "one_f_one_b", 1, 4 // replicas, replicas=replicas)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""
