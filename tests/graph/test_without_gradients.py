"""Without gradients: nothing is recorded, but for a loss that takes a gradient itself."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.without_gradients import without_gradients
from penstock.runtime.validate import validated
from tests.cli import mlp


def test_nothing_is_recorded() -> None:
    recorded: list[bool] = []

    def compute() -> Tensor:
        recorded.append(torch.is_grad_enabled())
        return torch.ones(2, requires_grad=True).sum()

    assert not without_gradients(compute).requires_grad
    assert recorded == [False]


def test_a_loss_that_takes_a_gradient_is_computed_with_all_recorded() -> None:
    x = torch.tensor([3.0], requires_grad=True)

    def compute() -> tuple[Tensor, dict[str, Tensor]]:
        (slope,) = torch.autograd.grad((x**2).sum(), x, create_graph=True)
        return slope.sum(), {"slope": slope}

    loss, figures = without_gradients(compute)
    assert (float(loss), float(figures["slope"])) == (6.0, 6.0)
    assert not loss.requires_grad
    assert not figures["slope"].requires_grad


def test_what_fails_otherwise_fails_once() -> None:
    calls: list[int] = []

    def compute() -> Tensor:
        calls.append(1)
        return torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError, match="size"):
        without_gradients(compute)
    assert len(calls) == 1


def penalized(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.detach().requires_grad_()
    value = model(x).square().mean()
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    return value + slope.square().sum()


def slopes(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    x = batch.detach().requires_grad_()
    return {"slope": torch.autograd.grad(model(x).sum(), x)[0].abs().mean()}


@pytest.mark.parametrize("metrics", [None, slopes])
def test_a_penalty_on_a_gradient_is_validated(metrics) -> None:
    torch.manual_seed(0)
    model, batches = nn.Linear(3, 1), list(torch.randn(2, 4, 3))
    job = replace(mlp.job(), loss=penalized, validation=lambda: batches, metrics=metrics)
    found = validated(job, model)
    expected = sum(float(penalized(model, batch).detach()) for batch in batches) / 2
    assert found["val_loss"] == pytest.approx(expected)
    if metrics:
        assert found["val_slope"] == pytest.approx(float(model.weight.detach().abs().mean()))
    assert all(weight.grad is None for weight in model.parameters())
