"""The codec: exact bytes, bounded errors, zeros and signs kept, nothing lost that is no number."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.graph.codec import TensorForm, packed_kinds, packer, unpacker
from penstock.graph.graph import Graph, Node
from penstock.graph.wire import error_bound, is_packed, message_bytes, packed_bytes, row_length

DTYPES = {
    torch.float64: 1e-15,
    torch.float32: 3e-7,
    torch.bfloat16: 4e-3,
    torch.float16: 5e-4,
}  # by dtype: how far it is from a number, as a part of it
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)


def there(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return `x` as it arrives."""
    kind = TensorForm(tuple(x.shape), x.dtype)
    packed = packer(kind, bits)(x)
    assert [(part.shape, part.dtype) for part in packed] == packed_kinds(kind, bits)
    name = str(x.dtype).removeprefix("torch.")
    sent = sum(part.numel() * part.element_size() for part in packed)
    assert sent == packed_bytes(kind.shape, name, bits)
    return unpacker(kind, bits)(packed)


@given(shapes, st.integers(2, 16), st.sampled_from(list(DTYPES)), st.integers(0, 99))
def test_numbers_arrive_within_the_bound_in_the_bytes_that_are_said(shape, bits, dtype, seed):
    drawn = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-4, 4, shape, generator=drawn)
    x = (torch.randn(shape, generator=drawn, dtype=torch.float64) * scales).to(dtype)
    x.view(-1)[0] = 0
    y = there(x, bits)
    assert (y.shape, y.dtype, float(y.view(-1)[0])) == (x.shape, dtype, 0.0)
    rows = x.double().view(-1, row_length(shape))
    greatest = rows.abs().amax(1, keepdim=True)
    apart = (y.double().view(rows.shape) - rows).abs()
    assert bool((apart <= greatest * (error_bound(bits) + DTYPES[dtype])).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8, 9, 12, 15, 16])
def test_codes_are_the_nearest_ones_with_their_signs(bits):
    """Codes k of a row whose greatest is the greatest code: each arrives as it is."""
    most = 2 ** (bits - 1) - 1
    codes = torch.arange(-most, most + 1).double()
    x = codes.repeat(math.ceil(130 / len(codes)))[None]  # no multiple of 8
    assert torch.equal(there(x, bits), x)
    assert torch.equal(there((x + 0.4).clamp(-most, most), bits), x)


def test_row_with_what_is_no_number_arrives_without_any_and_leaves_the_others_alone():
    x = torch.ones(4, 64)
    x[0, 3], x[1, 5], x[2] = math.nan, math.inf, 0.0
    y = there(x, 8)
    assert not y[:2].isfinite().any()
    assert torch.equal(y[2:], x[2:])


@given(shapes)
def test_row_is_the_last_dimensions_with_64_numbers_or_all(shape):
    length = row_length(shape)
    sizes = [math.prod(shape[at:]) for at in range(len(shape) + 1)]
    assert length in sizes
    assert length >= 64 or length == math.prod(shape)
    assert all(size < 64 for size in sizes if size < length)


def test_only_floats_that_come_from_weights_are_packed_and_only_where_that_is_smaller():
    def node(name, kind, inputs, shape, dtype="float32"):
        size = math.prod(shape) * (8 if dtype == "int64" else 4)
        return Node(name, kind, "op", inputs, shape, dtype, size, 0)

    nodes = (
        node("w", "parameter", (), (64,)),
        node("x", "input", (), (2, 64)),
        node("mask", "op", (1,), (2, 64)),
        node("y", "op", (0, 1), (2, 64)),
        node("tokens", "op", (3,), (2, 64), "int64"),
        node("loss", "op", (3,), ()),
        node("scale", "scale", (), ()),
        node("gradient", "op", (6,), (2, 64)),
    )
    graph = Graph(("key",), nodes, 5, {}, (), 2, 0)
    packed = [node.name for at, node in enumerate(nodes) if is_packed(graph, at, 8)]
    assert packed == ["w", "y", "gradient"]
    assert not any(is_packed(graph, at, 32) for at in range(len(nodes)))
    assert message_bytes(graph, (3, 2, 4), 8) == (2 * 4 + 128) + 512 + 1024
