"""FLOP of one traced op: torch's own formulas, attention on CPU added, else one per element."""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def flop_of(node: fx.Node) -> int:
    """Return the floating-point operations of one traced op.

    2 * m * n * k for a product; 4 * b * h * q * k * d for attention, 10 / 4 of it backward;
    the number of elements written for everything else; 0 for a view.
    Ignores:  masked halves of causal attention; operations on integers.
    """
    value = node.meta.get("val")
    if node.target is operator.getitem or value is None:
        return 0
    packet = getattr(node.target, "_overloadpacket", None)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if packet == aten._scaled_dot_product_flash_attention_for_cpu:
        return 4 * _attention(args[0], args[1])
    if packet == aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return 10 * _attention(args[1], args[2])
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=value))
    outputs = value if isinstance(value, tuple | list) else (value,)
    owned = [out for out in outputs if isinstance(out, Tensor) and not _is_view(node)]
    return sum(math.prod(out.shape) for out in owned if _known(out))


def _attention(query: Tensor, key: Tensor) -> int:
    batch, heads, length, size = query.shape
    return int(batch * heads * length * key.shape[2] * size)


def _known(tensor: Tensor) -> bool:
    return all(isinstance(size, int) for size in tensor.shape)


def _is_view(node: fx.Node) -> bool:
    schema: Any = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
