"""Jobs that a plan would train to other weights than their author's loop."""

import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

import penstock as ps
from tests.cli import mlp
from tests.cli.training import small


def again(start: int) -> Iterator[dict[str, Tensor]]:
    """Yield the same micro-batches wherever it is asked to begin."""
    yield from mlp.data(0)


def ignores_start() -> ps.Job:
    return replace(small(), data=again)


class Anneals(nn.Module):
    """A module whose forward depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp.model()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x) / (1 + 0.1 * self.calls)


def anneals() -> ps.Job:
    return replace(small(), model=Anneals)


def drops() -> ps.Job:
    """A job that leaves a micro-batch out by Python's own dice."""

    def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return mlp.loss(module, batch) * (0.5 if random.random() < 0.1 else 1.0)

    return replace(small(), loss=loss)


class Normed(torch.optim.SGD):
    """Goes by the norm of all gradients together."""

    def step(self, closure: None = None) -> None:
        everything = [p for group in self.param_groups for p in group["params"]]
        norm = sum(float(p.grad.square().sum()) for p in everything if p.grad is not None)
        for group in self.param_groups:
            group["lr"] = 1e-2 / (1.0 + norm**0.5)
        super().step()


def looks_across() -> ps.Job:
    return replace(small(), optimizer=lambda weights: Normed(weights, lr=1e-2))


def divides() -> ps.Job:
    return replace(small(), optimizer=lambda weights: torch.optim.SGD(weights, lr=1e-2))


class Kept(nn.Module):
    """A module whose output depends on a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp.model()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x) * self.scale.clone()
        self.scale.copy_(0.9 * self.scale + 0.1 * y.detach().abs().mean())
        return y


def reads_its_buffer() -> ps.Job:
    return replace(small(), model=Kept)
