"""What forward registers for itself, and no state_dict holds, is no state."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.examine.impurities import impurities
from penstock.graph.lasting import lasting_buffers
from penstock.graph.trace import build_model, capture
from penstock.prove.plain import Plain
from penstock.prove.prove import Planned, prove, prove_eager
from penstock.state.laws.buffers import buffer_laws
from penstock.state.laws.measured import measured_laws
from tests.parity.models import plan_of

D = 8


class Masked(nn.Module):
    """Keeps a mask as long as the longest batch so far."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)
        self.register_buffer("scale", torch.ones(D), persistent=False)
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        if self.mask is None or len(self.mask) < length:
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            self.register_buffer("mask", mask, persistent=False)
        scores = (x @ x.mT).masked_fill(self.mask[:length, :length], -1e9)
        return x + scores.softmax(-1) @ self.values(x * self.scale)


class Rotary(nn.Module):
    """Registers a table that it has not named before."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            angles = torch.outer(torch.arange(x.shape[1]), torch.arange(D) / D)
            self.register_buffer("table", angles.cos(), persistent=False)
        return x + self.values(x * self.table)


class Counting(Masked):
    """Has a buffer that is written and saved beside the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().forward(x)


class Follows(nn.Module):
    """Reads in a batch what it has registered in the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        before = getattr(self, "before", torch.zeros(D))
        self.register_buffer("before", x.detach().mean((0, 1)), persistent=False)
        return self.values(x - before)


def job_of(made: Callable[[], nn.Module]) -> ps.Job:
    def data(start: int):
        for number in count(start):
            yield torch.randn(2, 4, D, generator=torch.Generator().manual_seed(number))

    return ps.Job(
        lambda: nn.Sequential(made(), made()),
        lambda model, x: model(x).square().mean(),
        data,
        lambda weights: torch.optim.AdamW(weights, lr=0.01),
        micro_batches=4,
    )


@pytest.mark.parametrize("made", [Masked, Rotary, Counting])
def test_what_forward_makes_for_itself_is_proved(made):
    job = job_of(made)
    assert impurities(job) == ()
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 2, replicas=2)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""
    replicas = 1 if made is Counting else 2  # untraced, nobody knows the law of its mean
    assert prove_eager(job, replicas, (0, 2)).problem == ""


def test_only_what_the_model_was_built_with_or_saves_lasts():
    model = build_model(job_of(Counting))
    first = set(lasting_buffers(model))
    assert first == {f"{at}.{name}" for at in (0, 1) for name in ("mean", "scale")}
    model(torch.ones(1, 4, D))
    assert set(lasting_buffers(model)) == first
    model.register_buffer("own", torch.ones(2))
    assert set(lasting_buffers(model)) == {*first, "own"}
    assert set(lasting_buffers(Masked())) == {"scale"}


def test_laws_do_not_name_what_forward_makes():
    assert measured_laws(job_of(Masked)) == {}
    assert set(buffer_laws(job_of(Counting), capture(job_of(Counting)))) == {"0.mean", "1.mean"}


def test_a_model_that_is_handed_out_again_is_as_it_was_built():
    model = nn.Sequential(Masked(), Rotary())
    job = replace(job_of(Masked), model=lambda: model)
    Plain(job).gradients(0)
    assert set(Plain(job).buffers()) == {"0.scale"}
    captured = capture(job)
    plan = plan_of(captured.graph, "one_f_one_b", 2, 4)
    assert prove(Planned(job, captured, plan), (0, 2)).problem == ""


def test_what_follows_from_the_batch_before_is_found():
    (found,) = impurities(job_of(Follows))
    assert found.what == "what is computed"
    assert "what an earlier micro-batch made" in found.why
