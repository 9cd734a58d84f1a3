"""Buffers that forward makes larger, or late; lists in an optimizer's state; rounding that grows.

Equal all, also resumed and exported; the first four without a plan, and so refused with one.
"""

import torch
from small import WIDTH, pairs, squares
from torch import nn
from torch.nn import functional as F

import penstock as ps

THIRD = {"*": "free"}


def _two():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def _sgd(weights):
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def _job(**options) -> ps.Job:
    options = {"model": _two, "loss": squares, "optimizer": _sgd, "micro_batches": 2, **options}
    return ps.Job(data=pairs, **options)


class Scaled(nn.Module):
    """Outputs of a layer, divided by what was seen of them."""

    def __init__(self, seen, *, saved=True) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.register_buffer("seen", seen, persistent=saved)

    def forward(self, x):
        h = self.layer(x).tanh()
        if self.training:
            self.see(h.detach())
        return self.out(h / (1 + self.seen.abs().mean(0)))

    def see(self, h):
        self.seen = torch.cat([self.seen, h])[-11:]


class Growing(Scaled):
    def see(self, h):
        self.seen = torch.cat([self.seen, h.mean(0, keepdim=True)])


class FirstSeen(Scaled):
    def see(self, h):
        if self.seen is None:
            self.seen = h


def buffer_that_grows() -> ps.Job:
    """A row for each micro-batch is added to a buffer that is empty at first."""
    return _job(model=lambda: Growing(torch.zeros(0, WIDTH)))


def queue_that_fills() -> ps.Job:
    """A queue of outputs is empty at first and holds eleven rows then."""
    return _job(model=lambda: Scaled(torch.zeros(0, WIDTH)))


def queue_that_no_state_dict_holds() -> ps.Job:
    """The same with persistent=False."""
    return _job(model=lambda: Scaled(torch.zeros(0, WIDTH), saved=False))


def scale_of_the_first_outputs() -> ps.Job:
    """A buffer is None until the first call of forward."""
    return _job(model=lambda: FirstSeen(None))


def history_of_gradients() -> ps.Job:
    """Each weight's state is a list of its last three gradients, and a tuple of numbers."""

    class Recent(torch.optim.Optimizer):
        def __init__(self, weights) -> None:
            super().__init__(weights, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state["last"] = [*state.get("last", []), p.grad.clone()][-3:]
                    norm, count = state.get("pair", (0.0, 0))
                    state["pair"] = (0.5 * norm + float(p.grad.norm()), count + 1)
                    p.sub_(sum(state["last"]), alpha=group["lr"] / (1 + state["pair"][0]))

    return _job(optimizer=Recent)


def norm_of_batch_in_loss() -> ps.Job:
    """Outputs and targets are normed over the batch, and only their correlations count."""

    def loss(model, batch):
        a = F.batch_norm(model(batch[0]), None, None, training=True)
        b = F.batch_norm(batch[1], None, None, training=True)
        return (a.T @ b / len(a) - torch.eye(4)).square().sum()

    return _job(loss=loss, micro_batches=1)
