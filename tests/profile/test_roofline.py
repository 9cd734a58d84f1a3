"""Rooflines: seconds of ops from peaks, by hand and as properties."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.cluster import DeviceKind
from penstock.errors import ClusterError, ProfileError
from penstock.graph.graph import Graph, Node
from penstock.graph.trace import trace
from penstock.profile.estimate import estimated
from penstock.profile.roofline import CLASSES, DEFAULT, Efficiency, class_of, op_seconds, works_of
from tests.graph.zoo import floats, job_of
from tests.search.chains import chain

WHOLE = Efficiency(tuple((name, 1.0) for name in CLASSES), launch_s=0.0)
DEVICE = DeviceKind("gpu", 1 << 30, (("float32", 100.0),), 10.0)


def op(target: str, inputs: tuple[int, ...], shape: tuple[int, ...], at: int, **more) -> Node:
    size = 4
    for length in shape:
        size *= length
    fields = {"dtype": "float32", "size_bytes": size, "storage": at, "flop": size // 4, **more}
    return Node(f"n{at}", "op", target, inputs, shape, **fields)


def graph_of(*nodes: Node) -> Graph:
    """Return a graph of two inputs of 40 bytes and `nodes`; the last is the loss."""
    inputs = [Node(f"x{k}", "input", "", (), (10,), "float32", 40, k) for k in range(2)]
    return Graph(("key",), (*inputs, *nodes), len(nodes) + 1, {}, (), 1, 0)


def seconds(*nodes: Node, device: DeviceKind = DEVICE) -> float:
    return op_seconds(graph_of(*nodes), device, WHOLE)[-1]


@pytest.mark.parametrize(
    ("target", "flop", "expected"),
    [
        ("aten.mm.default", 4000, "product"),
        ("aten.addmm.default", 4000, "product"),
        ("aten.bmm.default", 4000, "product"),
        ("aten.convolution_backward.default", 4000, "convolution"),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", 4000, "attention"),
        ("aten.embedding_dense_backward.default", 10, "gather"),
        ("aten.index.Tensor", 10, "gather"),
        ("aten.native_layer_norm.default", 10, "reduction"),
        ("aten._log_softmax.default", 10, "reduction"),
        ("aten.sum.dim_IntList", 10, "reduction"),
        ("aten.gelu.default", 10, "element-wise"),
        ("aten.add.Tensor", 10, "element-wise"),
        ("mine.fused_thing.default", 4000, "product"),
    ],
)
def test_class_is_told_by_the_name_and_the_flop(target: str, flop: int, expected: str) -> None:
    assert class_of(op(target, (0,), (10,), 2, flop=flop)) == expected


def test_product_takes_the_longer_of_its_flop_and_its_bytes() -> None:
    assert seconds(op("aten.mm.default", (0, 1), (10,), 2, flop=5000)) == 5000 / 100
    assert seconds(op("aten.mm.default", (0, 1), (10,), 2, flop=20)) == (40 + 40 + 40) / 10


def test_other_ops_take_their_bytes_a_value_that_is_read_twice_counted_once() -> None:
    assert seconds(op("aten.mul.Tensor", (0, 1), (10,), 2)) == (40 + 40 + 40) / 10
    assert seconds(op("aten.mul.Tensor", (0, 0), (10,), 2)) == (40 + 40) / 10


def test_parts_of_a_result_are_written_by_the_op_that_makes_them() -> None:
    both = op("aten.native_layer_norm.default", (0,), (), 2, dtype="", size_bytes=0, flop=10)
    parts = [op("getitem", (2,), (10,), at, flop=0) for at in (3, 4)]
    rows = op_seconds(graph_of(both, *parts), DEVICE, WHOLE)
    assert rows == (0, 0, (40 + 40 + 40) / 10, 0, 0)


def test_views_cost_nothing_and_what_writes_into_a_value_does() -> None:
    view = op("aten.view.default", (0,), (10,), 2, storage=0, flop=0)
    assert seconds(view) == 0
    assert seconds(replace(view, target="aten.add_.Tensor", flop=10)) == (40 + 40) / 10


def test_of_a_table_only_what_is_taken_is_read() -> None:
    table = op("aten.zeros.default", (), (1000,), 2)
    taken = op("aten.embedding.default", (2, 0), (10,), 3)
    assert seconds(table, taken) == (80 + 40) / 10


def test_share_and_launch_come_on_top() -> None:
    half = Efficiency(tuple((name, 0.5) for name in CLASSES), launch_s=3.0)
    graph = graph_of(op("aten.mul.Tensor", (0, 1), (10,), 2))
    assert op_seconds(graph, DEVICE, half)[-1] == 3.0 + 2 * 12


def test_rate_that_the_device_lacks_is_an_error_only_where_it_is_needed() -> None:
    half = {"dtype": "bfloat16", "flop": 4000}
    with pytest.raises(ClusterError, match='"gpu" has no FLOP/s for bfloat16; known: float32'):
        seconds(op("aten.mm.default", (0, 1), (10,), 2, **half))
    assert seconds(op("aten.mul.Tensor", (0, 1), (10,), 2, dtype="int64")) > 0


rates = st.floats(1.0, 1e3)


@given(rates, rates, st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_faster_device_is_never_slower(
    flops: float, memory: float, more: float, wider: float
) -> None:
    graph = chain([7, 3, 9], [5, 8, 2])
    slow = DeviceKind("slow", 1, (("int8", 1e6 * flops),), memory)
    fast = DeviceKind("fast", 1, (("int8", 1e6 * flops * more),), memory * wider)
    pairs = zip(*(op_seconds(graph, device, DEFAULT) for device in (fast, slow)), strict=True)
    assert all(quick <= late for quick, late in pairs)
    one, other = estimated(graph, fast, 2.0), estimated(graph, slow, 2.0)
    assert one.accumulate_s_per_byte <= other.accumulate_s_per_byte
    assert one.update.update_s_per_byte <= other.update.update_s_per_byte
    assert one.copying.copy_s_per_byte <= other.copying.copy_s_per_byte


@given(st.integers(11, 10**6), st.integers(0, 10**6), st.integers(1, 50), st.integers(0, 50))
def test_more_flop_or_more_bytes_never_take_less(
    flop: int, more: int, size: int, wider: int
) -> None:
    def taken(flop: int, length: int) -> float:
        return seconds(op("aten.mm.default", (0, 1), (length,), 2, flop=flop + 51))

    assert taken(flop, size) <= taken(flop + more, size)
    assert taken(flop, size) <= taken(flop, size + wider)


def test_traced_model_has_work_for_every_op_but_views() -> None:
    graph = trace(job_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), floats(4, 8)))
    found = {work.of for work in works_of(graph) if work is not None}
    assert {"product", "reduction"} <= found
    for node, work in zip(graph.nodes, works_of(graph), strict=True):
        if work is not None:
            assert node.kind == "op"
            assert work.moved_bytes > 0


@pytest.mark.parametrize(
    ("share", "launch_s", "says"),
    [
        (WHOLE.share[1:], 0.0, "shares of"),
        ((*WHOLE.share[1:], (CLASSES[0], 0.0)), 0.0, "the share of product is 0"),
        (WHOLE.share, -1.0, "launch_s is -1"),
        (WHOLE.share, float("nan"), "launch_s is nan"),
    ],
)
def test_efficiency_that_cannot_be_is_refused(share, launch_s: float, says: str) -> None:
    with pytest.raises(ProfileError, match=says):
        Efficiency(share, launch_s)
