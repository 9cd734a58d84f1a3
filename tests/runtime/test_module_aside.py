"""Aside: a module waits in the host's memory only on an accelerator, and only if nobody looks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.device import Device
from penstock.runtime import module_aside
from penstock.runtime.module_aside import bring_back, set_aside


def rank_of(model: nn.Module, *, is_plain: bool = True, state: dict[str, object] | None = None):
    weights = SimpleNamespace(updates=SimpleNamespace(is_plain=is_plain))
    capture, job = SimpleNamespace(model=model), SimpleNamespace(state=state or {})
    return SimpleNamespace(capture=capture, job=job, weights={0: weights, 1: weights})


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the device of this process be one that is not the CPU."""
    monkeypatch.setattr(module_aside, "here", lambda: Device("meta"))


def kinds(model: nn.Module) -> set[str]:
    return {each.device.type for each in (*model.parameters(), *model.buffers())}


def test_module_on_a_cpu_stays_as_it_is() -> None:
    model = nn.BatchNorm1d(2)
    before = [each.data_ptr() for each in (*model.parameters(), *model.buffers())]
    set_aside(rank_of(model))
    bring_back(model)
    assert [each.data_ptr() for each in (*model.parameters(), *model.buffers())] == before


@pytest.mark.usefixtures("on_meta")
@pytest.mark.parametrize("looked_at", [{"is_plain": False}, {"state": {"ema": object()}}])
def test_module_that_something_looks_at_stays(looked_at: dict[str, Any]) -> None:
    model = nn.Linear(2, 2, device="meta")  # from where nothing can be moved
    set_aside(rank_of(model, **looked_at))
    assert kinds(model) == {"meta"}


@pytest.mark.usefixtures("on_meta")
def test_parameters_in_one_memory_stay_in_one() -> None:
    model = nn.Linear(2, 2)
    model.bias.data = model.weight.data[0]
    set_aside(rank_of(model))
    assert model.bias.data_ptr() == model.weight.data_ptr()
    assert torch.equal(model.bias, model.weight[0])
