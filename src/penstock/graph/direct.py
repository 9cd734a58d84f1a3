"""Direct: torch's own Python functions for the ATen ops that have one.

`torch.ops.aten.mm.default(a, b)` parses its arguments by the op's schema at run time, `torch.mm`
by code that was generated for it: 0.5 to 4 us less for each call (view 0.7, sum 1.3, layer norm
2.0, convolution 4.0), which is a tenth of a small model's step.  Both dispatch the same op on the
same arguments; a test holds that for every entry and for every op of its models.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten


def viewed(tensor: Tensor, shape: list[int]) -> Tensor:
    """Return the tensor in another shape: a view, or a copy where it does not lie as traced.

    Where ops are run one by one, results of LAID_OTHERWISE stay as they are.
    """
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.reshape(shape)  # raises again where it does not fit at all


DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.clone.default: torch.clone,
    aten.convolution.default: torch.convolution,
    aten.copy_.default: Tensor.copy_,
    aten.div.Tensor: torch.div,
    aten.embedding.default: torch.embedding,
    aten.exp.default: torch.exp,
    aten.expand.default: Tensor.expand,
    aten.gelu.default: F.gelu,
    aten.mean.dim: torch.mean,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_layer_norm.default: torch.native_layer_norm,
    aten.neg.default: torch.neg,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.rsqrt.default: torch.rsqrt,
    aten.select.int: torch.select,
    aten.sigmoid.default: torch.sigmoid,
    aten.squeeze.dim: torch.squeeze,
    aten.stack.default: torch.stack,
    aten.sub.Tensor: torch.sub,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
    aten.unbind.int: torch.unbind,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: viewed,
    aten.where.self: torch.where,
}

# Whose fake result may lie otherwise than the real one, of tensors that are not contiguous alike.
# What follows was traced for the fake one: a group norm's gradient takes its inputs as alike.
LAID_OTHERWISE = {
    aten.binary_cross_entropy_backward.default,
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.huber_loss_backward.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.softplus_backward.default,
}


def order_of(value: Tensor) -> list[int]:
    """Return the dims of a tensor, those of the largest strides first."""
    return sorted(range(value.dim()), key=lambda dim: -value.stride(dim))


def laid(value: Tensor, order: Sequence[int]) -> Tensor:
    """Return the tensor, dense, with its dims in this order in memory: itself where it is so."""
    if len(order) < 2:
        return value
    back = sorted(range(len(order)), key=order.__getitem__)
    return value.permute(*order).contiguous().permute(*back)
