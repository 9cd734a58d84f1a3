"""Stages of many plans, made once: the same, field by field, as those of each plan by itself."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.graph.alike import AlikeStages
from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.known_stages import KnownStages
from penstock.graph.owners import owners_of
from penstock.graph.trace import trace
from tests.graph.zoo import floats, job_of

BLOCKS = 8


class Block(nn.Module):
    """A residual block: two values of one op, dropout, and a product."""

    def __init__(self, shared: nn.Linear, width: int) -> None:
        super().__init__()
        self.norm, self.shared = nn.LayerNorm(8), shared
        self.inner = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 16))

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.inner(self.norm(x)).chunk(2, -1)
        kept: Tensor = x + self.shared(nn.functional.dropout(left.tanh() * right, 0.1))
        return kept


class Blocks(nn.Module):
    """Blocks of two widths by turns, one weight in common, a skip over all, a mask for all."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block(shared, 16 if k % 2 else 64) for k in range(BLOCKS))
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("mask", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        for block in self.blocks:
            y = block(y * self.mask.square())
        return self.norm(y + x.tanh())


@cache
def graph() -> Graph:
    return trace(job_of(Blocks, floats((4, 8))))


@cache
def known() -> KnownStages:
    return KnownStages(graph(), AlikeStages(graph()).segments)


def most() -> int:
    return len(graph().cut_points)


@given(st.data())
def test_stages_made_once_are_those_of_each_plan(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, most() - 1), max_size=BLOCKS)))
    again = tuple(data.draw(st.booleans()) for _ in range(len(cuts) + 1))
    backward = data.draw(st.booleans())
    plain = cut(graph(), cuts, again, backward=backward)
    assert cut(graph(), cuts, again, backward=backward, known=known()) == plain


@given(st.sets(st.integers(0, 20)))
def test_owners_follow_from_those_of_the_finest_cut(chosen: set[int]) -> None:
    cuts = sorted(c for c in chosen if c < most())
    places = [graph().cut_points[c].at for c in cuts]
    plain, fast = owners_of(graph(), places), KnownStages(graph()).owners(cuts)
    assert (fast.stage_of, fast.repeated, fast.once) == (
        plain.stage_of,
        plain.repeated,
        plain.once,
    )


@pytest.mark.parametrize("again", [False, True])
def test_stages_of_like_blocks_are_made_once(again: bool) -> None:
    alike = AlikeStages(graph())
    blocks = [at for at, point in enumerate(graph().cut_points) if point.name.startswith("after")]
    cut(graph(), blocks, [again] * (len(blocks) + 1), known=KnownStages(graph(), alike.segments))
    assert len(alike._made) < len(blocks)


class Wired(nn.Module):
    """The same ops whichever it is; one near the end reads a value that lives long, or not."""

    def __init__(self, *, is_long: bool) -> None:
        super().__init__()
        self.is_long, self.inner = is_long, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        first = self.inner(x) + 1
        then = first + 2
        last = then + 3
        return last + (first if self.is_long else then).mean()


def test_stages_of_the_same_ops_that_read_others_are_not_alike() -> None:
    def model() -> nn.Module:
        return nn.Sequential(*(Wired(is_long=at % 2 == 0) for at in range(4)))

    wired = trace(job_of(model, floats((4, 8))))
    known = KnownStages(wired, AlikeStages(wired).segments)
    for again in (False, True):
        cuts = [at for at, point in enumerate(wired.cut_points) if point.name.startswith("after")]
        repeats = [again] * (len(cuts) + 1)
        assert cut(wired, cuts, repeats, known=known) == cut(wired, cuts, repeats)


def test_ops_that_a_stage_repeats_are_its_own() -> None:
    again: Sequence[bool | tuple[int, ...]] = [
        tuple(op for op in stage.forward.ops if graph().nodes[op].target == "aten.tanh.default")
        for stage in cut(graph(), range(most())).stages
    ]
    assert cut(graph(), range(most()), again, known=known()) == cut(graph(), range(most()), again)
