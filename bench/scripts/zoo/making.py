"""What happens while models and optimizers are made, and state where nobody looks."""

import array
import itertools
import os
import random
import sqlite3

import torch
from small import WIDTH, deep, pairs, squares
from torch import nn
from torch.optim import Optimizer

import penstock as ps


def _job(model=deep, loss=squares, data=pairs, **options) -> ps.Job:
    options = {"optimizer": lambda w: torch.optim.SGD(w, lr=0.1), "micro_batches": 4, **options}
    return ps.Job(model=model, loss=loss, data=data, **options)


# -- making ---------------------------------------------------------------------------------------


def weights_from_a_generator_of_the_job() -> ps.Job:
    """Weights are drawn from one torch.Generator, which goes on from model to model."""
    source = torch.Generator().manual_seed(3)

    def model():
        made = deep()
        for p in made.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.3, generator=source)
        return made

    return _job(model)


def widths_drawn_by_python() -> ps.Job:
    """The width of the model is drawn by a random.Random of the job."""
    source = random.Random(1)

    def model():
        width = source.choice([6, 8, 10])
        first = [nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
        return nn.Sequential(*first, nn.Linear(width, 4))

    return _job(model)


def models_that_are_numbered() -> ps.Job:
    """Every model that is built has the next seed, as members of an ensemble."""
    numbers = itertools.count()

    def model():
        torch.manual_seed(next(numbers))
        return deep()

    return _job(model)


def layer_that_the_optimizer_freezes() -> ps.Job:
    """The function that makes the optimizer freezes the first layer and takes what is left."""

    def optimizer(weights):
        for p in weights[:2]:
            p.requires_grad_(False)
        return torch.optim.SGD([p for p in weights if p.requires_grad], lr=0.1)

    return _job(optimizer=optimizer)


def head_that_the_optimizer_clears() -> ps.Job:
    """The function that makes the optimizer sets the head to zero before."""

    def optimizer(weights):
        nn.init.zeros_(weights[-2])
        return torch.optim.SGD(weights, lr=0.1)

    return _job(optimizer=optimizer)


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) * 0.3 for _ in range(3))
        self.others = nn.ParameterDict(
            {"shift": torch.zeros(()), "head": torch.randn(4, WIDTH) * 0.3, "none": torch.zeros(0)}
        )

    def forward(self, x):
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x @ self.others["head"].T + self.others["shift"] + self.others["none"].sum()


def parameters_of_no_dimension_and_no_element() -> ps.Job:
    """A list and a dict of parameters, one of them a number, one empty (nothing is wrong)."""
    return _job(_Kept)


def anomalies_are_looked_for() -> ps.Job:
    """torch.autograd.set_detect_anomaly(True), left on (nothing is wrong)."""
    torch.autograd.set_detect_anomaly(True)
    return _job()


# -- optimizers inside optimizers -----------------------------------------------------------------


class _Switching(Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.first = torch.optim.Adam(self.param_groups, lr=0.01, eps=1e-2)
        self.second = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        (self.first if self.steps <= 5 else self.second).step()


def optimizer_that_switches() -> ps.Job:
    """Adam for five steps, then SGD with momentum; both inside one optimizer."""
    return _job(optimizer=_Switching)


class _ScheduleFree(Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1, "beta": 0.9, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["z"], state["x"] = p.clone(), p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / group["steps"])
                p.copy_(state["x"] * group["beta"] + state["z"] * (1 - group["beta"]))


def schedule_free() -> ps.Job:
    """Schedule-free SGD: two sequences in the state, a count in the group (nothing is wrong)."""
    return _job(optimizer=_ScheduleFree)


def scaled_by_the_loss_and_back_by_a_hook() -> ps.Job:
    """The loss is 1024 times as large; a hook before the step divides the gradients in place."""

    def optimizer(weights):
        made = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

        def hook(*_):
            for p in weights:
                if p.grad is not None:
                    p.grad.div_(1024)

        made.register_step_pre_hook(hook)
        return made

    return _job(loss=lambda model, batch: 1024 * squares(model, batch), optimizer=optimizer)


# -- places where nobody looks --------------------------------------------------------------------


def counter_in_an_array() -> ps.Job:
    """A counter in an array.array; from the 23rd call on the loss is halved."""
    calls = array.array("i", [0])

    def loss(model, batch):
        calls[0] += 1
        return squares(model, batch) * (0.5 if calls[0] > 22 else 1.0)

    return _job(loss=loss)


def counter_in_the_environment() -> ps.Job:
    """The count of calls stands in os.environ; from the 23rd on the loss is halved."""

    def loss(model, batch):
        os.environ["CALLS_OF_LOSS"] = str(int(os.environ.get("CALLS_OF_LOSS", "0")) + 1)
        return squares(model, batch) * (0.5 if int(os.environ["CALLS_OF_LOSS"]) > 22 else 1.0)

    return _job(loss=loss)


def counter_in_a_database() -> ps.Job:
    """Calls are rows of a table in memory; from the 23rd on the loss is halved."""
    table = sqlite3.connect(":memory:", check_same_thread=False)
    table.execute("create table calls (number integer)")

    def loss(model, batch):
        table.execute("insert into calls values (1)")
        ((calls,),) = table.execute("select count(*) from calls").fetchall()
        return squares(model, batch) * (0.5 if calls > 22 else 1.0)

    return _job(loss=loss)
