"""Direct: every entry, and every op of every model here, dispatches what the trace says."""

import pytest
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.code import callable_of
from penstock.graph.direct import DIRECT, aten
from penstock.graph.trace import capture
from tests.graph.zoo import JOBS

X, Y, B = torch.rand(4, 4) + 0.5, torch.rand(4, 4), torch.rand(2, 3, 3)
IMAGE, FILTERS = torch.rand(1, 3, 8, 8), torch.rand(4, 3, 3, 3)

# What each op is called with in traces: tensors, numbers beside tensors, keywords.
CALLS: dict[object, list[tuple[tuple, dict]]] = {
    aten.add.Tensor: [((X, Y), {}), ((X, 2), {}), ((X, 0.5), {}), ((X, Y), {"alpha": 2})],
    aten.addmm.default: [((X[0], X, Y), {}), ((X, X, Y), {"beta": 2, "alpha": 0.5})],
    aten.bmm.default: [((B, B), {})],
    aten.cat.default: [(([X, Y],), {}), (([X, Y], -1), {})],
    aten.clone.default: [((X,), {}), ((X.t(),), {"memory_format": torch.contiguous_format})],
    aten.convolution.default: [
        ((IMAGE, FILTERS, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), {}),
        ((IMAGE, FILTERS, X[0], [2, 2], [0, 0], [1, 1], False, [0, 0], 1), {}),
    ],
    aten.copy_.default: [((X.clone(), Y), {}), ((X.clone(), Y[0]), {})],
    aten.div.Tensor: [((X, Y), {}), ((X, 3), {}), ((X.long(), 2), {})],
    aten.embedding.default: [((X, torch.tensor([1, 2])), {}), ((X, torch.tensor([1]), 0), {})],
    aten.exp.default: [((X,), {})],
    aten.expand.default: [((X[:1], [4, 4]), {}), ((X, [2, -1, 4]), {})],
    aten.gelu.default: [((X,), {}), ((X,), {"approximate": "tanh"})],
    aten.mean.dim: [((X, [-1], True), {}), ((X, [0, 1]), {}), ((X, [0]), {"dtype": torch.double})],
    aten.mm.default: [((X, Y), {})],
    aten.mul.Tensor: [((X, Y), {}), ((X, 2), {}), ((X, 0.5), {}), ((X.long(), 0.5), {})],
    aten.native_layer_norm.default: [
        ((X, [4], X[0], Y[0], 1e-5), {}),
        ((X, [4], None, None, 1e-5), {}),
    ],
    aten.neg.default: [((X,), {})],
    aten.permute.default: [((B, [2, 0, 1]), {})],
    aten.relu.default: [((X,), {})],
    aten.rsqrt.default: [((X,), {})],
    aten.select.int: [((X, 0, 1), {}), ((X, 1, -1), {})],
    aten.sigmoid.default: [((X,), {})],
    aten.squeeze.dim: [((X[:1], 0), {}), ((X, 0), {})],
    aten.stack.default: [(([X, Y],), {}), (([X, Y], 1), {})],
    aten.sub.Tensor: [((X, Y), {}), ((X, 1), {}), ((X, Y), {"alpha": 2})],
    aten.sum.dim_IntList: [
        ((X, [0], True), {}),
        ((X, [0, 1]), {}),
        ((X, [1]), {"dtype": torch.double}),
    ],
    aten.t.default: [((X,), {}), ((X[0],), {})],
    aten.tanh.default: [((X,), {})],
    aten.transpose.int: [((B, 0, 1), {}), ((B, -1, -2), {})],
    aten.unbind.int: [((B,), {}), ((B, 1), {})],
    aten.unsqueeze.default: [((X, 0), {}), ((X, -1), {})],
    aten.view.default: [((X, [16]), {}), ((X, [2, -1]), {}), ((X[0, 0], []), {})],
    aten.where.self: [((X > 1, X, Y), {})],
}


class Heard(TorchDispatchMode):
    """Notes every op with its arguments as they reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, tuple, dict]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def heard(function, args, kwargs):
    with torch.no_grad(), Heard() as mode:
        result = function(*args, **kwargs)
    return mode.calls, result


def same(a, b) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("op", DIRECT, ids=str)
def test_entry_dispatches_its_op_and_nothing_else_and_gives_the_same(op):
    for args, kwargs in CALLS[op]:
        expected, wanted = heard(op, args, kwargs)
        calls, found = heard(callable_of(op), args, kwargs)
        assert [call[0] for call in calls] == [op], args
        assert same([*calls[0][1]], [*expected[0][1]]), args
        assert calls[0][2] == expected[0][2], args
        assert same(found, wanted), args


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOBS)
def test_ops_of_a_traced_model_dispatch_as_traced(name):
    captured = capture(JOBS[name])
    seen = 0
    for node in captured.fx_nodes:
        if node.target in DIRECT:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            calls, found = heard(callable_of(node.target), args, kwargs)
            ops = [op for op, _, _ in calls if op is not torch.ops.prim.device.default]  # of fakes
            assert ops == [node.target], node.format_node()
            assert _layout(found) == _layout(node.meta["val"]), node.format_node()
            seen += 1
    assert seen


def _layout(value):
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return [_layout(item) for item in value]
