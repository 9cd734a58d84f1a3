"""What an optimizer holds goes into a state and back, into one that has made steps already, too."""

import copy
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from penstock.job import Job
from penstock.prove.plain import Plain
from penstock.state.optimizer_state import ExtraState


class Own(Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def each(self):
        yield from (p for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def down(self, rate: float):
        for p in self.each():
            p.sub_(p.grad, alpha=rate)


class Alternates(Own):
    """Up in one step, down in the next: SAM in two steps of the loop."""

    up = True

    def __init__(self, parameters):
        super().__init__(parameters)
        self.up = True

    def step(self, closure=None):
        self.down(0.1 if self.up else 0.3)
        self.up = not self.up


class CountsLate(Own):
    """Has its counter from the first step on."""

    def step(self, closure=None):
        self.made = getattr(self, "made", 0) + 1
        self.down(0.1 / self.made)


class CountsInItsState(Own):
    def step(self, closure=None):
        self.state["made"] = (self.state.get("made", 0) + 1) % 3
        self.down(0.1 * (1 + self.state["made"]))
        if not self.state["made"]:
            del self.state["made"]


class Forgets(Own):
    """Drops the state of all parameters after each third step."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.each():
            row = self.state[p]
            row["mean"] = row.get("mean", torch.zeros_like(p)) * 0.9 + p.grad
            row["made"] = row.get("made", 0) + 1
            p.sub_(row["mean"], alpha=0.1)
        if row["made"] == 3:
            self.state.clear()


class Queues(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.rates, self.lately = deque([0.1, 0.2, 0.3]), deque(maxlen=2)
        self.last = torch.zeros(1)

    def step(self, closure=None):
        self.rates.rotate(1)
        self.lately.append(self.rates[0])
        self.last = 0.01 - self.last
        self.down(sum(self.lately) + float(self.last))


class Swings(Own):
    """Writes another rate into its group in each other step."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 if group["lr"] != 0.1 else 0.4
            if group["lr"] == 0.1:
                group.pop("swung", None)
            else:
                group["swung"] = True
            self.down(group["lr"] * (2 if "swung" in group else 1))


class Wraps(Own):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.inner = Alternates(parameters)

    def step(self, closure=None):
        self.inner.step()


KINDS = Alternates, CountsLate, CountsInItsState, Forgets, Queues, Swings, Wraps


def plain(kind) -> Plain:
    return Plain(
        Job(
            lambda: nn.Linear(2, 1),
            lambda model, batch: model(batch).sum(),
            lambda start: iter(()),
            lambda weights: kind(list(weights)),
        )
    )


def stepped(loop: Plain, count: int, first: int = 0) -> Plain:
    for number in range(first, first + count):
        loop.update(number, {n: torch.full_like(p, number + 1) for n, p in loop.parameters.items()})
    return loop


def state_of(loop: Plain):
    tensors, values = loop.optimizer_state()
    now = [
        {k: v for k, v in group.items() if k != "params" and v != first.get(k)}
        for group, first in zip(loop.optimizer.param_groups, loop.options, strict=True)
    ]
    loop.own.put(now, tensors, values)
    tensors |= {f"weights/{name}": value for name, value in loop.weights().items()}
    return {key: value.clone() for key, value in tensors.items()}, copy.deepcopy(values)


@pytest.mark.parametrize("kind", KINDS)
@given(before=st.integers(0, 7), done=st.integers(0, 7))
def test_a_loop_that_has_made_steps_goes_on_from_any_state_as_a_new_one(kind, before, done):
    state = state_of(stepped(plain(kind), done))
    used, new = stepped(plain(kind), before), plain(kind)
    for loop in (used, new):
        loop.load(*state)
        stepped(loop, 4, done)
    unbroken = stepped(plain(kind), done + 4).weights()
    for name, value in unbroken.items():
        assert torch.equal(used.weights()[name], value)
        assert torch.equal(new.weights()[name], value)


def test_of_a_large_attribute_no_copy_is_held():
    class Averages(Own):
        def __init__(self, parameters):
            super().__init__(parameters)
            self.means = [torch.zeros(2**15) for _ in range(2)]

    parameters = {"a": nn.Parameter(torch.zeros(2))}
    own = ExtraState(Averages(parameters.values()), parameters, is_whole=True)
    assert own.at_first["optimizer-own/means"] is None
