"""A hook after steps that reaches the module keeps the optimizer whole, by structure."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.state.optimizer.reach import hook_with_module, lines_of, reached_by_hooks

MODULE = nn.Linear(2, 2)


def hooked(hook: Callable[..., object], *, after: bool = True) -> torch.optim.Optimizer:
    made = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    (made.register_step_post_hook if after else made.register_step_pre_hook)(hook)
    return made


def in_a_list():
    built = [nn.Linear(2, 2)]
    return lambda *_: built[-1].zero_grad()


def through_a_function():
    built = {"student": nn.Linear(2, 2)}

    def follow(number: int) -> None:
        built["student"].bias.data.mul_(number)

    numbers = iter(range(9))
    return lambda *_: follow(next(numbers))


def of_a_global(*_: object) -> None:
    MODULE.zero_grad()


def given(module: nn.Module, *_: object) -> None:
    module.zero_grad()


@pytest.mark.parametrize(
    "hook",
    [
        in_a_list(),
        through_a_function(),
        torch.no_grad()(in_a_list()),
        of_a_global,
        partial(given, MODULE),
        MODULE.zero_grad,
    ],
    ids=["list", "function", "decorated", "global", "partial", "method"],
)
def test_a_module_in_reach_is_found_with_the_line(hook):
    place = hook_with_module(hooked(hook))
    assert place
    assert hook_with_module(hooked(hook, after=False)) == ""


def of_its_groups(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data.clamp_(-1, 1)


def of_weights():
    weights, history = [nn.Parameter(torch.ones(2))], SimpleNamespace(norms=[])
    return lambda *_: history.norms.append(float(weights[0].norm()))


@pytest.mark.parametrize("hook", [of_its_groups, of_weights()], ids=["groups", "weights"])
def test_a_hook_of_parameters_alone_is_none(hook):
    assert hook_with_module(hooked(hook)) == ""


class Trainer:
    """Has a module, and a hook."""

    def __init__(self) -> None:
        self.kept: dict[str, nn.Module] = {}

    def after(self, *_: object) -> None:
        self.kept["model"].zero_grad()


@pytest.mark.parametrize("after", [True, False])
def test_what_comes_into_reach_later_is_found_through_an_object_of_the_author(after: bool) -> None:
    trainer = Trainer()
    optimizer = hooked(trainer.after, after=after)
    assert reached_by_hooks(optimizer) == {}
    trainer.kept["model"] = MODULE
    (line,) = reached_by_hooks(optimizer).values()
    assert line.endswith(f":{Trainer.after.__code__.co_firstlineno}")
    assert bool(hook_with_module(optimizer, objects=True)) == after
    assert not hook_with_module(optimizer)


class Own(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize(
    "hook", [in_a_list(), torch.no_grad()(in_a_list()), partial(given, MODULE)]
)
def test_what_the_author_does_at_a_step_is_named_by_its_line(hook, after):
    (line,) = lines_of(hooked(hook, after=after))
    path, number = line.rsplit(":", 1)
    assert path == __file__
    written = Path(path).read_text().splitlines()[int(number) - 1]
    assert "lambda *_: built[-1]" in written or "def given" in written


def test_a_step_of_a_class_of_the_author_has_a_line_and_one_of_torch_has_none():
    own = Own(nn.Linear(2, 2).parameters(), lr=0.1)
    own.inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert len(lines_of(own)) == 1
    assert lines_of(own.inner) == []
