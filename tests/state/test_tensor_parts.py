"""Parts of a tensor are put together, whoever has divided it, and a missing one is named."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.state.tensor_parts import part_key, whole


@st.composite
def divisions(draw: st.DrawFn) -> tuple[Tensor, list[tuple[int, int]]]:
    """A tensor of random shape and how some stages divide it, their parts in random order."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    value = torch.randn(shape)
    parts: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 3))):
        size = value.numel()
        inner = draw(st.sets(st.integers(1, size - 1), max_size=4)) if size > 1 else ()
        parts += pairwise([0, *sorted(inner), size])
    return value, draw(st.permutations(parts))


def saved(value: Tensor, parts: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    numbers = value.reshape(-1)
    return {part_key("weights/w", one, value.shape): numbers[one:end] for one, end in parts}


@given(divisions())
def test_parts_of_several_divisions_make_the_whole_tensor(case):
    """Of two parts that begin alike a file holds one: that which was written last."""
    value, parts = case
    other = torch.ones(3)
    found = whole({**saved(value, parts), "weights/other": other})
    assert found.keys() == {"weights/w", "weights/other"}
    assert torch.equal(found["weights/w"], value)
    assert found["weights/other"] is other


@given(divisions(), st.data())
def test_a_part_that_is_missing_is_told(case, data):
    value, parts = case
    covered = sorted({one for one, _ in parts})
    lost = data.draw(st.sampled_from(covered))
    kept = [(one, end) for one, end in parts if one < lost and end <= lost]
    with pytest.raises(CheckpointError, match="weights/w") as problem:
        whole(saved(value, kept) or {part_key("weights/w", 1, value.shape): torch.ones(1)})
    assert "a part of it is missing" in problem.value.hint


def test_a_tensor_without_numbers_is_whole():
    assert whole(saved(torch.ones(0, 3), [(0, 0)]))["weights/w"].shape == (0, 3)
