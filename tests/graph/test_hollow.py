"""A model without values: traced as one with values, and it takes no memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.graph.hollow import HollowError, hollow, with_small_values
from penstock.graph.trace import build_model, capture
from penstock.graph.waiting import is_hollow
from penstock.profile.measure import optimizer_state

MIXED = Path(__file__).parents[2] / "examples" / "mixed.toml"


class Net(nn.Module):
    """Tied weights, a norm with statistics, a mask that Python asks for, a parameter of its own."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.outer = nn.Linear(width, width, bias=False)
        self.outer.weight = self.inner.weight
        shared = nn.Parameter(torch.ones(width))
        shared.decays = False  # type: ignore[attr-defined]
        self.first, self.second = nn.ParameterList([shared]), nn.ParameterList([shared])
        self.register_buffer("mask", torch.arange(width) > 1)
        nn.init.orthogonal_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.outer(self.norm(self.inner(x)))[:, self.mask]
        return kept.sum() * self.first[0].sum() * self.second[0].mean()


def job_of(build: type[nn.Module] = Net) -> ps.Job:
    def data(start: int) -> Iterator[Tensor]:
        while True:
            yield torch.ones(4, 6)

    return ps.Job(build, lambda model, x: model(x), data, torch.optim.AdamW, micro_batches=2)


def test_step_is_traced_as_that_of_a_model_with_values() -> None:
    job = job_of()
    without, real = capture(hollow(job)), capture(job)
    assert without.graph.digest == real.graph.digest
    assert is_hollow(without.model)
    assert not is_hollow(real.model)


def test_parameters_have_no_memory_and_stay_tied_and_noted() -> None:
    model = build_model(hollow(job_of()))
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in Net().named_parameters()
    }
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.first[0] is model.second[0]
    assert model.first[0].decays is False


def test_parameters_of_later_models_have_values() -> None:
    build_model(hollow(job_of()))
    assert not any(parameter.is_meta for parameter in Net().parameters())


def test_optimizer_keeps_as_much_of_a_model_without_values() -> None:
    job = hollow(job_of())
    assert optimizer_state(capture(job), job) == 2.0


def test_small_values_stand_for_parameters_and_leave_them_as_they_were() -> None:
    model = build_model(hollow(job_of()))
    before = dict(model.named_parameters())
    with with_small_values(model, 2) as values:
        assert values["inner.weight"].shape == (2, 2)
        assert model.inner.weight is model.outer.weight  # type: ignore[union-attr]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_trace_for_machines_elsewhere_is_estimated_there_and_measured_with_values() -> None:
    graph = ps.trace(job_of(), elsewhere=True)
    profile, *_ = ps.estimate(graph, ps.Cluster.load(MIXED))
    assert profile.graph == ps.measure(graph).graph == ps.trace(job_of()).digest
    assert is_hollow(graph.capture.model)


class Asks(nn.Module):
    """Asks for a value of what it has just made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.scale = float(self.inner.weight.abs().max())

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.inner(x).sum()


def test_constructor_that_asks_for_values_is_refused_with_its_line() -> None:
    with pytest.raises(HollowError, match=r"self\.scale = float"):
        build_model(hollow(job_of(Asks)))
