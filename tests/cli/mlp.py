"""A small job that is traced and trained in a moment: what the command line is tried on."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor, nn

import penstock as ps

WIDTH, SAMPLES = 32, 8


def model() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return a sum: micro-batches are joined by the graph, whatever the loss is."""
    return (module(batch["x"]) - batch["y"]).square().sum()


def mean_loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]) - batch["y"]).square().mean()


def data(start: int) -> Iterator[dict[str, Tensor]]:
    for index in count(start):
        drawn = torch.Generator().manual_seed(index)
        x = torch.randn(SAMPLES, WIDTH, generator=drawn)
        yield {"x": x, "y": x.sum(1, keepdim=True)}


def sgd(weights):
    return torch.optim.SGD(weights, lr=1e-3)


def job() -> ps.Job:
    return ps.Job(model, loss, data, sgd, micro_batches=4, num_steps=4)


def adam() -> ps.Job:
    """The same model with another optimizer."""
    return ps.Job(model, loss, data, lambda weights: torch.optim.Adam(weights), micro_batches=4)


def joins() -> ps.Job:
    """A job of which two micro-batches can be joined to one."""
    return ps.Job(model, mean_loss, data, sgd, micro_batches=2)


def wider() -> ps.Job:
    """Another model, to which a plan for `job` does not fit."""
    wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, 1))
    return ps.Job(lambda: wide, loss, data, sgd, micro_batches=4)


def no_job() -> int:
    return 3


def raises() -> ps.Job:
    raise KeyError("weights")


def empty() -> ps.Job:
    return ps.Job(model, loss, lambda start: iter(()), sgd)


def loss_raises() -> ps.Job:
    def wrong(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return module(batch["z"]).mean()

    return ps.Job(model, wrong, data, sgd)


def model_raises() -> ps.Job:
    def wrong() -> nn.Module:
        raise OverflowError("no such width")

    return ps.Job(wrong, loss, data, sgd)


value = 3


def talks() -> ps.Job:
    print("this is for stdout")

    def told(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        print("and this")
        return loss(module, batch)

    return ps.Job(model, told, data, sgd, micro_batches=4)


def interrupted() -> ps.Job:
    """A job during whose measuring every process of the group gets Ctrl-C, this one last."""
    calls = count()

    def interrupts(weights):
        if next(calls):  # first only its settings are asked for
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            os.killpg(0, signal.SIGINT)
            for companion in multiprocessing.active_children():
                companion.join(0.5)  # where it heeds the signal, it has time to say so
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return sgd(weights)

    return ps.Job(model, loss, data, interrupts, micro_batches=4)
