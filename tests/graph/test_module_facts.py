"""What a traced step takes for granted of its modules, and what of it has changed, in words."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.graph.module_facts import changes, traced_facts
from penstock.graph.trace import Capture, build, capture


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.BatchNorm1d(2))


def _one_more(model: nn.Sequential) -> None:
    model.append(nn.Tanh())


def _hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: setattr(model[1], "p", 0.5), {"p of 1: 0.1, then 0.5"}),
        (lambda model: setattr(model[2], "momentum", 0.2), {"momentum of 2: 0.1, then 0.2"}),
        (lambda model: model[1].eval(), {"training of 1: True, then False"}),
        (
            lambda model: model[0].weight.requires_grad_(False),
            {"requires_grad of 0.weight: True, then False"},
        ),
        (
            lambda model: setattr(model[0], "bias", None),
            {"requires_grad of 0.bias is gone", "the hooks of 0.bias is gone"},
        ),
        (_hooked, {"the hooks of module 0: 0, then 1"}),
        (
            _one_more,
            {"training of 3 is new", "the class of 3 is new", "the hooks of module 3 is new"},
        ),
    ],
)
def test_what_changes_is_named(change: Callable[[nn.Sequential], object], words: set[str]) -> None:
    model = net()
    before = traced_facts(model)
    assert [*changes(before, traced_facts(model))] == []
    assert [*changes(before, traced_facts(net()))] == []
    change(model)
    assert {*changes(before, traced_facts(model))} >= words


def test_what_a_job_notes_at_a_module_of_torch_is_no_fact() -> None:
    model = net()
    before = traced_facts(model)
    model.epoch, model[1].seen = 3, "a note"
    assert [*changes(before, traced_facts(model))] == []


def _traced(models: list[nn.Sequential]) -> Capture:
    def model() -> nn.Module:
        models.append(net())
        return models[-1]

    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    job = ps.Job(model, loss, lambda start: iter([torch.ones(4, 2)]), torch.optim.SGD)
    build(job)  # which may be called for a module once more, at any time
    captured = capture(job)
    build(job)
    return captured


def test_the_model_that_was_traced_and_the_one_built_last_count() -> None:
    models: list[nn.Sequential] = []
    captured = _traced(models)
    assert captured.changes == []
    models[0][1].p = 0.7  # nobody looks at that one
    assert captured.changes == []
    models[-1][1].p = 0.5
    assert captured.changes == ["p of 1: 0.1, then 0.5"]
    captured.model.eval()
    assert "training of 2: True, then False" in captured.changes


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.scale


def _scaled() -> Capture:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        return module(batch).square().mean()

    return capture(ps.Job(Scaled, loss, lambda start: iter([torch.ones(4, 2)]), torch.optim.SGD))


def _filled(model: nn.Module) -> None:
    model.scale.fill_(2.0)


def _first_row(model: nn.Module) -> None:
    model.head.weight.data[0] = 0.0


def _turned(model: nn.Module) -> None:
    model.head.weight.data.copy_(model.head.weight.flip(0))


@pytest.mark.parametrize(
    ("write", "name"), [(_filled, "scale"), (_first_row, "head.weight"), (_turned, "head.weight")]
)
def test_values_that_ranks_do_not_have_are_named_from_when_they_are_noted(write, name) -> None:
    captured = _scaled()
    with torch.no_grad():
        captured.model.scale.fill_(3.0)
        captured.note_values()
        assert captured.changes == []
        write(captured.model)
        assert captured.changes == [f"the values of {name}: changed"]
        captured.note_values()
        assert captured.changes == [f"the values of {name}: changed"]
        captured.note_values(again=True)
        assert captured.changes == []
        captured.note_values([captured.model])  # it is the run's own
        captured.model.scale.fill_(4.0)
        assert captured.changes == []
