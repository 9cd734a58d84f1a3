"""Waiting: what has no room on an accelerator; that it computes the same is in tests/rehearsal."""

import pytest
import torch
from torch import nn

from penstock.device import Device
from penstock.graph import waiting
from penstock.graph.waiting import COPIES, backward_of, has_to_wait, lent, placed, waits


def test_model_on_a_cpu_waits_for_nothing() -> None:
    model = nn.Linear(2, 2)
    assert placed(model) is model
    assert not has_to_wait(model)
    assert not waits(model)
    with lent(model):
        backward_of(model(torch.ones(2)).sum(), model)
    assert model.weight.grad is not None


@pytest.mark.parametrize("room", [0, 1])
def test_model_waits_whose_loop_would_fill_an_accelerator(monkeypatch, room: int) -> None:
    size = 4 * 1024
    monkeypatch.setattr(Device, "usable_bytes", property(lambda own: COPIES * size - 1 + room))
    monkeypatch.setattr(waiting, "here", lambda: Device("cuda"))
    monkeypatch.setattr(waiting, "can_wait", lambda: True)  # which asks a device that is there
    assert has_to_wait(nn.Linear(32, 32, bias=False)) == (room == 0)
