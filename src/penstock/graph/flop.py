"""FLOP of one traced op: torch's own formulas, attention on CPU added, else one per element."""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from penstock import _compat
from penstock.graph.functional import is_static, is_view

aten = torch.ops.aten


def flop_of(node: fx.Node) -> int:
    """Return the floating-point operations of one traced op.

    2 * m * n * k for a product; 4 * b * h * q * k * d for attention, 10 / 4 of it backward;
    2 * steps * b * weights for a recurrent layer, 4 backward; the number of elements written
    for everything else; 0 for a view.  Attention that is told to be causal computes the pairs that
    may see each other.
    Ignores:  pairs that a mask leaves out; ops whose sizes depend on data.
    """
    value = node.meta.get("val")
    if node.target is operator.getitem or value is None or is_view(node):
        return 0
    outputs = _tensors(value)
    read = [x for source in node.all_input_nodes for x in _tensors(source.meta.get("val"))]
    if not all(map(is_static, outputs + read)):
        return 0
    packet = _compat.packet_of(node.target)
    given: Any = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    args, kwargs = given
    if packet == aten._scaled_dot_product_flash_attention_for_cpu:
        return _seen(node, args[0], args[1], 4 * _attention(args[0], args[1]))
    if packet == aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return _seen(node, args[1], args[2], 10 * _attention(args[1], args[2]))
    if packet == aten.mkldnn_rnn_layer:
        return 2 * _recurrent(args[0], args[1:3])
    if packet == aten.mkldnn_rnn_layer_backward:
        return 4 * _recurrent(args[0], args[1:3])
    if packet == aten._grouped_mm:
        return 2 * args[0].numel() * args[1].shape[-1]
    if packet in flop_registry:
        flop = int(flop_registry[packet](*args, **kwargs, out_val=value))
        at = 1 if "backward" in str(packet) else 0  # of the queries
        is_attention = "scaled_dot_product" in str(packet)
        return _seen(node, args[at], args[at + 1], flop) if is_attention else flop
    return sum(math.prod(out.shape) for out in outputs)


def _recurrent(x_TBD: Tensor, weights: list[Tensor]) -> int:
    return math.prod(x_TBD.shape[:2]) * sum(weight.numel() for weight in weights)


def _tensors(value: Any) -> list[Tensor]:
    values = _compat.pytree.tree_leaves(value)
    return [one for one in values if isinstance(one, Tensor)]


def _attention(query: Tensor, key: Tensor) -> int:
    batch, heads, length, size = query.shape
    return int(batch * heads * length * key.shape[2] * size)


def _seen(node: fx.Node, query: Tensor, key: Tensor, flop: int) -> int:
    """Return the FLOP of attention that are left where each place sees those up to its own."""
    schema = _compat.schema_of(node.target)
    names = () if schema is None else [argument.name for argument in schema.arguments]
    given: dict[str, object] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("is_causal") is not True:
        return flop
    queries, keys = int(query.shape[-2]), int(key.shape[-2])
    first = min(queries, keys)  # of the queries: query i sees i + 1 keys; the others see all
    pairs = first * (first + 1) // 2 + (queries - first) * keys
    return flop * pairs // (queries * keys)
