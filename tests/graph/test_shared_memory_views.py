"""Leaves of a batch that have elements in common: found, copied with them, traced with them."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.errors import GraphError
from penstock.graph.contents import own, own_apart, seen
from penstock.graph.cut import cut
from penstock.graph.shared_memory_views import overlaps_of
from penstock.graph.trace import capture
from penstock.job import Job
from tests.graph.executor import Step, run_cut, run_eager

CPU = torch.device("cpu")


@st.composite
def views(draw: st.DrawFn) -> list[Tensor]:
    """Return views of one to three storages: any sizes, strides (0 too) and offsets that fit."""
    sizes = draw(st.lists(st.integers(8, 80), min_size=1, max_size=3))
    dtypes = [draw(st.sampled_from([torch.float32, torch.int64, torch.bool])) for _ in sizes]
    wholes = [torch.arange(n).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    found = [_view(draw, draw(st.sampled_from(wholes))) for _ in range(draw(st.integers(1, 5)))]
    return [*found, *found[: draw(st.integers(0, 1))]]


def _view(draw: st.DrawFn, whole: Tensor) -> Tensor:
    shape, strides = draw(st.lists(st.integers(0, 4), max_size=3)), list[int]()
    offset = draw(st.integers(0, len(whole) - 1))
    left = len(whole) - 1 - offset
    for size in shape:
        strides.append(draw(st.integers(0, left // max(1, size - 1))))
        left -= max(0, size - 1) * strides[-1]
    return whole.as_strided(shape, strides, offset)


def elements(leaf: Tensor) -> set[int]:
    """Return the bytes at which the elements of a leaf begin; all are of one size in a storage."""
    ranges = (range(size) for size in leaf.shape)
    at = (
        sum(i * stride for i, stride in zip(index, leaf.stride(), strict=True))
        for index in itertools.product(*ranges)
    )
    return {leaf.data_ptr() + place * leaf.element_size() for place in at}


def repeats(leaf: Tensor) -> bool:
    return len(elements(leaf)) < leaf.numel()


def pairs(leaves: list[Tensor]) -> list[set[int]]:
    """Return what each pair of leaves has in common, from the first byte that each holds."""
    return [
        {byte - one.data_ptr() for byte in elements(one) & elements(other)}
        for one, other in itertools.combinations(leaves, 2)
    ]


@given(views())
def test_overlaps_are_the_leaves_that_have_elements_in_common(leaves: list[Tensor]) -> None:
    overlaps = overlaps_of(leaves)
    known = {frozenset(overlap.leaves) for overlap in overlaps}
    groups: list[set[int]] = []
    for place, leaf in enumerate(leaves):
        near = [g for g in groups if any(elements(leaf) & elements(leaves[k]) for k in g)]
        groups = [g for g in groups if g not in near] + [{place}.union(*near)]
    several = [g for g in groups if len(g) > 1 or any(repeats(leaves[k]) for k in g)]
    assert known == {frozenset(group) for group in several}
    for overlap in overlaps:
        first = min(leaves[k].data_ptr() for k in overlap.leaves)
        assert overlap.offsets == tuple(leaves[k].data_ptr() - first for k in overlap.leaves)


@given(views(), st.data())
def test_copy_has_values_strides_and_elements_in_common_as_the_batch(
    leaves: list[Tensor], data: st.DataObject
) -> None:
    copies: list[Tensor] = own(leaves, CPU)
    assert pairs(copies) == pairs(leaves)
    groups = (one.leaves for one in overlaps_of(leaves))
    shared = {k for group in groups if len({id(leaves[k]) for k in group}) > 1 for k in group}
    for place, (copy, leaf) in enumerate(zip(copies, leaves, strict=True)):
        assert torch.equal(copy, leaf)
        assert copy.dtype == leaf.dtype
        assert place not in shared or copy.stride() == leaf.stride()
        assert place not in shared or (copy.data_ptr() - leaf.data_ptr()) % 64 == 0
        assert elements(copy).isdisjoint(set[int]().union(*map(elements, leaves)))
    place = data.draw(st.integers(0, len(leaves) - 1))
    for each in (leaves[place], copies[place]):
        if each.numel():
            each[(0,) * each.dim()] = 0 if each.max() else 1
    for copy, leaf in zip(copies, leaves, strict=True):
        assert torch.equal(copy, leaf), "what is written through one is seen through the others"


def test_arrays_that_are_views_of_one_overlap() -> None:
    row = np.arange(18).reshape(2, 9)
    copies = own({"x": row[:, :-1], "y": row[:, 1:]}, CPU)
    copies["x"][0, 1] = 99
    assert copies["y"][0, 0] == 99
    assert row[0, 1] == 1


def test_views_of_other_dtypes_overlap() -> None:
    whole = torch.zeros(4, dtype=torch.int32)
    bits, number = own((whole.view(torch.int16)[1:], whole[2]), CPU)
    number.fill_(-1)
    assert bits.tolist() == [0, 0, 0, -1, -1, 0, 0]


def test_leaves_that_only_lie_between_each_other_are_copied_apart() -> None:
    whole = torch.zeros(1000, 1000)
    one, other = own((whole[:, 0], whole[:, 1]), CPU)
    assert overlaps_of([whole[:, 0], whole[:, 1]]) == ()
    assert one.untyped_storage().nbytes() + other.untyped_storage().nbytes() < 20_000


def test_overlap_of_a_thin_part_of_much_is_copied_as_what_the_leaves_cover() -> None:
    whole = torch.zeros(1_000_000)
    one, other = own((whole[5:10], whole[7:12]), CPU)
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    assert one.untyped_storage().nbytes() < 200


def test_batch_on_its_device_is_seen_as_it_is() -> None:
    x = torch.ones(3)
    assert seen({"x": x}, CPU)["x"] is x


def test_attributes_of_tensors_go_along() -> None:
    x = torch.arange(4)
    x.length = 3  # pyright: ignore
    for copies in (own((x, x[1:]), CPU), own_apart((x, x[1:]), CPU)):
        assert copies[0].length == 3
        assert not hasattr(copies[1], "length")


# -- traced --------------------------------------------------------------------------------------


def rows(start: int, split: Any = lambda t: (t[:, :-1], t[:, 1:])) -> Iterator[Any]:
    for k in itertools.count(start):
        yield split(torch.randn(3, 9, generator=torch.Generator().manual_seed(k)))


def masks(model: nn.Module, batch: Any) -> Tensor:
    batch[0][:, ::3] = 0
    return (model(batch[0]) - batch[-1]).square().mean()


def adds(model: nn.Module, batch: Any) -> Tensor:
    """Write into the labels, after the inputs were used."""
    found = model(batch[0].clone())
    batch[-1].add_(1)
    return (found - batch[-1]).square().mean() + batch[0].sum() * 0.01


def only_reads(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[-1]).square().mean()


SPLITS = {
    "shifted": lambda t: (t[:, :-1], t[:, 1:]),
    "the same": lambda t: (t[:, :8], t[:, :8]),
    "one object": lambda t: (x := t[:, :8], x),
    "turned": lambda t: (t[:, :8].t().t(), t.t()[1:].t()),
    "parts": lambda t: (t[:, :8], t[:, 1:7], t[:, 1:]),
    "apart": lambda t: (t[:, :8].clone(), t[:, 1:]),
}


def job_of(loss: Any, split: Any) -> Job:
    def data(start: int) -> Iterator[Any]:
        return rows(start, split)

    return Job(lambda: nn.Linear(8, 8), loss, data, lambda w: torch.optim.SGD(w, lr=0.1))


def equal(found: Step, expected: Step) -> bool:
    left = [*found.losses, *(found.gradients[name] for name in expected.gradients)]
    right = [*expected.losses, *expected.gradients.values()]
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("loss", [masks, adds])
def test_traced_step_computes_what_a_loss_that_writes_does(loss: Any, split: str) -> None:
    job = job_of(loss, SPLITS[split])
    captured = capture(job)
    assert captured.writes_batch
    assert bool(captured.batch.overlaps) == (split != "apart")
    for cuts in ((), range(len(captured.graph.cut_points))):
        found = run_cut(job, captured, cut(captured.graph, cuts), split=bool(cuts))
        assert equal(found, run_eager(job))


def test_batch_whose_leaves_overlap_otherwise_does_not_fit_a_loss_that_writes() -> None:
    captured = capture(job_of(masks, SPLITS["shifted"]))
    row = torch.randn(3, 9)
    for other in (row[:, 1:], row[:, :-1]), (row[:, :-1], row[:, 1:].clone()):
        with pytest.raises(GraphError, match="share memory; the step was traced for"):
            captured.leaves(other)
    captured = capture(job_of(masks, SPLITS["apart"]))
    with pytest.raises(GraphError, match="leaf 0 at byte 0 and leaf 1 at byte 4 share memory"):
        captured.leaves((row[:, :-1], row[:, 1:]))


def test_batch_fits_however_its_leaves_overlap_where_nothing_writes() -> None:
    captured = capture(job_of(only_reads, SPLITS["shifted"]))
    assert captured.batch.overlaps == captured.batch.written == ()
    row = torch.randn(3, 9)
    for split in (lambda t: (t[:, 1:], t[:, :-1]), lambda t: (t[:, 1:].clone(), t[:, 1:])):
        captured.leaves(split(row))


def test_views_of_two_dtypes_that_the_loss_writes_into_are_not_traced() -> None:
    job = job_of(masks, lambda t: (t[:, :8], t[:, :8].view(torch.int32)))
    with pytest.raises(GraphError, match="numbers of another dtype"):
        capture(job)


@pytest.mark.parametrize("place", [0, 1])
def test_overlaps_of_leaves_that_the_loss_leaves_alone_do_not_matter(place: int) -> None:
    def split(t: Tensor) -> Any:
        return [t[:, :8].clone(), t[:, :8], t[:, 1:]] if place else [*t.unbind(0), t[0]]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch[0].zero_()
        return sum(model(x[..., :8]).sum() for x in batch)

    captured = capture(job_of(loss, split))
    assert captured.batch.written == (0,)
    assert [o.leaves for o in captured.batch.overlaps] == ([] if place else [(0, 3)])
    row = torch.randn(3, 9)
    if place:
        captured.leaves([row[:, :8].clone(), row[:, 1:], row[:, :8].clone()])


def test_expanded_leaf_that_the_loss_writes_into_is_not_traced() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        batch[0, 0] = 1  # of all rows
        return model(batch).sum()

    with pytest.raises(GraphError, match="an element twice"):
        capture(job_of(loss, lambda t: t[:1, :8].expand(3, 8)))
    assert capture(job_of(only_reads, lambda t: (t[:1, :8].expand(3, 8), t[:, :8])))


def test_tensor_with_an_attribute_is_not_traced() -> None:
    def split(t: Tensor) -> Tensor:
        t.scale = 2.0  # pyright: ignore
        return t[:, :8]

    assert capture(job_of(lambda m, x: m(x).sum(), split))
    with pytest.raises(GraphError, match="leaf 0 of the batch has the attribute scale"):
        capture(job_of(lambda m, x: m(x[:, :8]).sum() * x.scale, lambda t: (split(t), t)[1]))
    captured = capture(job_of(lambda m, x: m(x).sum(), lambda t: t[:, :8]))
    late = torch.randn(3, 8)
    late.scale = 2.0  # pyright: ignore
    with pytest.raises(GraphError, match="the attribute scale"):
        captured.leaves(late)
