"""What a loss can reach in Python, and the job's code changes once the step is traced."""

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.examine.late_values import LateValues

SCALE = 1.0
_TABLE = {"rate": 0.5, "other": 2}


@dataclass
class Config:
    temperature: float = 1.0
    epoch: int = 0
    _width: float = 2.0

    @property
    def width(self) -> float:
        return self._width

    def shift(self) -> float:
        return _helped()


class Inner:
    factors = types.SimpleNamespace(first=1.0)


def _helped() -> float:
    return SCALE


class Scaled(nn.Module):
    beta = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.alpha, self.calls, self.note, self.unset = 1.0, 0, "", float("nan")
        self.scales, self.config, self.kept = [1.0, [2.0]], Config(), {"a": 1}
        self.mask, self.last = torch.ones(2), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.mean()
        x = self.head(x) * self.alpha * self.beta * self.mask * (self.unset == self.unset)
        x = x * self.scales[1][0] / self.config.temperature + self.config.shift()
        return x * self.config.width + self.last + Inner.factors.first

    def reset(self) -> None:
        self.note, self.kept = "reset", {}


def _job(loss: Callable[..., Tensor] | None = None) -> ps.Job:
    power = [2]

    def own(module: nn.Module, batch: Tensor, by: float = 1.0) -> Tensor:
        return module(batch).pow(power[0]).mean() * _TABLE["rate"] * by

    own.power = power  # type: ignore[attr-defined]
    return ps.Job(Scaled, loss or own, lambda start: iter([torch.ones(4, 2)]), torch.optim.SGD)


def _global(_job: ps.Job, _model: Any) -> None:
    global SCALE
    SCALE = 3.0


CHANGES: list[tuple[Callable[[Any, Any], object], str]] = [
    (lambda job, model: setattr(model, "alpha", 0.5), "model.alpha: changed (1, then 0.5)"),
    (lambda job, model: setattr(model, "beta", 3.0), "model.beta: changed"),
    (lambda job, model: model.scales[1].__setitem__(0, 5.0), "model.scales[1][0]: changed (2, "),
    (lambda job, model: model.scales.append(4.0), "the length of model.scales: changed (2, then 3"),
    (
        lambda job, model: setattr(model.config, "temperature", 0.5),
        "model.config.temperature: changed (1, then 0.5)",
    ),
    (lambda job, model: setattr(model.config, "_width", 0.5), "model.config._width: changed (2, "),
    (lambda job, model: setattr(model, "config", Config(epoch=1, temperature=9.0)), "temperature"),
    (lambda job, model: setattr(model, "mask", torch.zeros(2)), "model.mask: changed"),
    (lambda job, model: setattr(Inner.factors, "first", 7.0), "factors.first: changed (1, then 7"),
    (lambda job, model: job.loss.power.__setitem__(0, 4), "power[0]: changed (2, then 4)"),
    (lambda job, model: _TABLE.update(rate=0.25), "_TABLE['rate']: changed (0.5, then 0.25)"),
    (_global, "SCALE: changed (1, then 3)"),
]
NOTES: list[Callable[[Any, Any], object]] = [
    lambda job, model: None,
    lambda job, model: setattr(model, "note", "epoch 3"),
    lambda job, model: setattr(model, "epoch", 3),
    lambda job, model: setattr(model.config, "epoch", 3),
    lambda job, model: model.kept.update(a=2),
    lambda job, model: model(torch.ones(1, 2)),  # a validation counts its calls, and keeps its mean
    lambda job, model: setattr(job.loss, "seen", 3),
]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(_TABLE, "rate", 0.5)
    monkeypatch.setattr(Inner, "factors", types.SimpleNamespace(first=1.0))


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_what_the_loss_reads_is_told_with_its_line(
    change: Callable[[Any, Any], object], words: str
) -> None:
    job = _job()
    model = Scaled()
    late = LateValues(job, model)
    change(job, model)
    found = late.changes(model)
    assert found
    assert all(words in one for one in found)
    assert all(one.startswith(("tests/examine/test_late_values.py:", "/")) for one in found)


@pytest.mark.parametrize("change", NOTES)
def test_what_it_does_not_read_is_nothing(change: Callable[[Any, Any], object]) -> None:
    job = _job()
    model = Scaled()
    late = LateValues(job, model)
    change(job, model)
    assert late.changes(model) == []


class Objective:
    """A loss that is an object, whose method is another's."""

    def __init__(self) -> None:
        self.weights = {"rows": (1.0, 2.0)}

    def __call__(self, module: nn.Module, batch: Tensor) -> Tensor:
        return self.weighed(module(batch))

    def weighed(self, x: Tensor) -> Tensor:
        return x.mean() * self.weights["rows"][1]


def _partial(by: dict[str, float], module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch).mean() * by["x"]


@pytest.mark.parametrize("kind", ["object", "method", "partial", "wrapped"])
def test_losses_of_all_kinds_are_followed(kind: str) -> None:
    objective, by = Objective(), {"x": 1.0}

    @functools.wraps(_partial)
    def wrapped(*args: Any) -> Tensor:
        return _partial(by, *args)

    losses: dict[str, Any] = {
        "object": objective,
        "method": objective.__call__,
        "partial": functools.partial(_partial, by),
        "wrapped": wrapped,
    }
    model = Scaled()
    late = LateValues(_job(losses[kind]), model)
    assert late.changes(model) == []
    by["x"] = 2.0
    objective.weights["rows"] = (1.0, 3.0)
    (found,) = late.changes(model)
    assert "rows" in found or "x" in found


def test_hooks_of_modules_are_followed() -> None:
    model, by = Scaled(), [1.0]
    model.head.register_forward_hook(lambda _, __, result: result.mul(by[0]))
    late = LateValues(_job(), model)
    by[0] = 2.0
    (found,) = late.changes(model)
    assert "by[0]: changed (1, then 2)" in found
