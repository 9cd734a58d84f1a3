"""Buffers that forward makes anew once, and nobody saves, are traced as they are from then on."""

from collections.abc import Callable
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.examine.impurities import impurities
from penstock.graph.caches import fill_caches
from penstock.graph.trace import build_model, capture
from penstock.prove.prove import Planned, prove, prove_eager
from penstock.state.laws.measured import measured_laws
from penstock.state.weights import load_model
from tests.parity.models import plan_of

D, LENGTH = 8, 6


class Table(nn.Module):
    """A table of angles, made for 4 places and anew for more: in another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)
        self.register_buffer("step", torch.arange(D) / D, persistent=False)
        self.make(4)

    def make(self, length: int) -> None:
        self.longest = length
        angles = torch.outer(torch.arange(length), self.step)
        self.register_buffer("table", angles.cos(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.longest:
            self.make(x.shape[1])
        return x + self.values(x * self.table[: x.shape[1]])


class Scaled(Table):
    """What is made anew has the same shape, and is assigned."""

    def make(self, length: int) -> None:
        self.longest = length
        self.register_buffer("table", torch.ones(1), persistent=False) if length == 4 else None
        self.table = torch.full((1,), 4 / length)


class Normed(Table):
    """Also has statistics, which all forwards write."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Counted(nn.Module):
    """A buffer that each forward puts another tensor in the place of: state, saved or not."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.values(x) / self.calls


def job_of(made: Callable[[], nn.Module]) -> ps.Job:
    def data(start: int):
        for number in count(start):
            yield torch.randn(2, LENGTH, D, generator=torch.Generator().manual_seed(number))

    return ps.Job(
        lambda: nn.Sequential(made(), made()),
        lambda model, x: model(x).square().mean(),
        data,
        lambda weights: torch.optim.SGD(weights, lr=0.01),
        micro_batches=4,
    )


@pytest.mark.parametrize("made", [Table, Scaled, Normed])
def test_what_forward_makes_anew_once_is_proved(made):
    job = job_of(made)
    assert impurities(job) == ()
    captured = capture(job)
    assert not any("table" in name for name in captured.graph.effects())
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""


def test_no_law_is_asked_of_what_forward_makes_anew_once():
    assert measured_laws(job_of(Table)) == {}
    assert {name[2:] for name in measured_laws(job_of(Normed))} == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    assert prove_eager(job_of(Table), 2, (0, 2)).problem == ""


def test_what_every_forward_replaces_is_state():
    job = job_of(Counted)
    captured = capture(job)
    assert float(captured.model.get_buffer("0.calls")) == 0
    plan = plan_of(captured.graph, "one_f_one_b", 1, 4)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""
    assert set(measured_laws(job)) == {"0.calls", "1.calls"}


def test_filling_caches_leaves_all_else_as_it_was():
    model = Normed()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert fill_caches(model, lambda: model(torch.randn(2, LENGTH, D))) == {"table"}
    assert len(model.table) == LENGTH
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_checkpoint_gives_back_what_fits_of_what_nobody_saves():
    job = job_of(Table)
    model, filled = build_model(job), capture(job).model
    tensors = {f"weights/{name}": p.detach() + 1 for name, p in filled.named_parameters()}
    tensors |= {f"buffers/{name}": b + 1 for name, b in filled.named_buffers()}
    load_model(model, tensors)
    assert model[0].table.shape == (4, D)
    assert torch.equal(model[0].step, tensors["buffers/0.step"])
    assert torch.equal(model[1].values.weight, tensors["weights/1.values.weight"])
