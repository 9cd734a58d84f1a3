"""Direct: every entry, and every op of every model here, dispatches what the trace says."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.graph.code import callable_of, function_of
from penstock.graph.cut import cut
from penstock.graph.direct import DIRECT, LAID_OTHERWISE, aten, laid, order_of, viewed
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.profile.measure import inputs_of
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


def test_view_of_what_lies_otherwise_than_traced_is_a_copy():
    turned = torch.arange(6).reshape(2, 3).t()
    assert viewed(turned, [6]).tolist() == turned.reshape(6).tolist()
    assert viewed(X, [16]).data_ptr() == X.data_ptr()
    with pytest.raises(RuntimeError):
        viewed(X, [17])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_tensor_is_laid_in_any_order(order):
    dense = torch.arange(24).reshape(2, 3, 4)
    there = laid(dense, order)
    assert torch.equal(there, dense)
    assert order_of(there) == list(order)
    assert laid(there, order).data_ptr() == there.data_ptr()


def calls_of(op: Any, gradient: Tensor, x: Tensor) -> Any:
    """Call an op of a gradient, which may lie otherwise than what it is of."""
    more = {
        aten.elu_backward.default: (1, 1, 1, False, x),
        aten.hardtanh_backward.default: (x, -1, 1),
        aten.softplus_backward.default: (x, 1, 20),
        aten.mse_loss_backward.default: (x, gradient, 1),
        aten.smooth_l1_loss_backward.default: (x, gradient, 1, 1.0),
        aten.huber_loss_backward.default: (x, gradient, 1, 1.0),
        aten.binary_cross_entropy_backward.default: (x.sigmoid(), gradient.sigmoid(), None, 1),
    }
    first = gradient.sum() if "loss" in str(op) else gradient
    return op(first, *more.get(op, (x,)))


@pytest.mark.parametrize("op", sorted(LAID_OTHERWISE, key=str), ids=str)
def test_each_of_them_lies_otherwise_than_its_fake_result(op):
    x = torch.rand(2, 6, 4, 4).to(memory_format=torch.channels_last)
    gradient = torch.rand(2, 6, 4, 4)
    real = calls_of(op, gradient, x)
    with FakeTensorMode() as mode:
        fake = calls_of(op, mode.from_tensor(gradient), mode.from_tensor(x))
    assert real.stride() != fake.stride()
    assert laid(real, order_of(fake)).stride() == fake.stride()


NETS = {
    "hardswish": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Hardswish()],
    "hardsigmoid": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6), nn.Hardsigmoid()],
    "relu6": lambda: [nn.Conv2d(3, 6, 3), nn.GroupNorm(6, 6), nn.ReLU6()],
    "elu": lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ELU()],
    "softplus": lambda: [nn.Conv2d(3, 6, 3), nn.InstanceNorm2d(6), nn.Softplus()],
}


@pytest.mark.parametrize("name", NETS)
def test_step_of_channels_last_has_the_gradients_of_autograd(name):
    def model() -> nn.Module:
        net = nn.Sequential(*NETS[name](), nn.Flatten(), nn.Linear(216, 3))
        return net.to(memory_format=torch.channels_last)

    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return net(x.to(memory_format=torch.channels_last)).square().mean()

    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    job = Job(model=model, loss=loss, data=lambda start: iter([x]), optimizer=SGD)
    compare(job, x)


@pytest.mark.parametrize("of", [F.mse_loss, F.smooth_l1_loss, F.huber_loss])
def test_step_of_a_turned_output_has_the_gradients_of_autograd(of):
    def loss(net: nn.Module, x: Tensor) -> Tensor:
        return of(net(x).transpose(1, 2), x.transpose(1, 2).contiguous())

    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    compare(
        Job(model=lambda: nn.Linear(4, 4), loss=loss, data=lambda _: iter([x]), optimizer=SGD), x
    )


def compare(job: Job, x: Tensor) -> None:
    """Compare the gradients of a traced step with those that autograd gives."""
    traced = capture(job)
    (stage,) = cut(traced.graph).stages
    forward, backward = function_of(stage.forward, traced), function_of(stage.backward, traced)
    values = inputs_of(traced, job)
    with torch.no_grad():
        given = [values[at] for at in (*forward.statics, *forward.leaves)]
        made = dict(zip(forward.outputs, forward.run(given, 1), strict=True))
        given = [values[at] for at in (*backward.statics, *backward.leaves)]
        given += [made[at] for at in backward.values]
        made = dict(zip(backward.outputs, backward.run(given, 1), strict=True))
    torch.manual_seed(job.seed)
    model = job.model()
    job.loss(model, x).backward()
    for key, weight in model.named_parameters():
        torch.testing.assert_close(made[traced.graph.gradients[key]], weight.grad)


def test_a_number_lies_as_it_lies():
    number = torch.tensor(2.0)
    assert laid(number, order_of(number)) is number
