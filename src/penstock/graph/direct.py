"""Direct: torch's own Python functions for the ATen ops that have one.

`torch.ops.aten.mm.default(a, b)` parses its arguments by the op's schema at run time, `torch.mm`
by code that was generated for it: 0.5 to 4 us less for each call (view 0.7, sum 1.3, layer norm
2.0, convolution 4.0), which is a tenth of a small model's step.  Both dispatch the same op on the
same arguments; a test holds that for every entry and for every op of its models.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten

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
    aten.view.default: Tensor.view,
    aten.where.self: torch.where,
}
