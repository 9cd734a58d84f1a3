"""Reserved: bytes that real kernels return where fake ones return nothing.

A fused LSTM hands its backward a workspace whose size only the kernel knows; on fake tensors it is
empty.  Such an op is run once, on zeros, and what it returns is measured.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from penstock.device import of
from penstock.graph.functional import is_static


def reserved_bytes(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the bytes of each value that is empty on fake tensors only, and is read.

    They are those of the kernels of this device.
    Ignores:  a kernel that refuses zeros: its value counts as empty.
    """
    found: dict[fx.Node, int] = {}
    known: dict[object, list[int]] = {}
    for node in graph.nodes:
        if _is_empty(node) and node.users and isinstance(source := node.args[0], fx.Node):
            key = _key(source)
            if key not in known:
                known[key] = _measured(source)
            if (at := int(node.args[1])) < len(known[key]) and known[key][at]:
                found[node] = known[key][at]
    return found


def _is_empty(node: fx.Node) -> bool:
    """Return whether a node takes an empty tensor out of several that an op returns."""
    value = node.meta.get("val")
    return (
        node.target is operator.getitem
        and isinstance(value, Tensor)
        and is_static(value)
        and value.numel() == 0
    )


def _key(node: fx.Node) -> object:
    """Return a key that is equal for ops whose results have equal sizes."""
    like: Any = fx.map_arg((node.args, node.kwargs), _shape)
    return repr((node.target, like))


def _shape(source: fx.Node) -> Any:
    value = source.meta.get("val")
    return (str(value.dtype), *value.shape) if isinstance(value, Tensor) else None


def _measured(node: fx.Node) -> list[int]:
    """Return the bytes of each tensor that an op returns on zeros; none where it fails on them."""
    inputs: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
    if not all(isinstance(each, Tensor) and is_static(each) and each.numel() for each in inputs):
        return []
    target: Any = node.target
    with torch.enable_grad(), of(inputs[0].device).random_kept():
        args, kwargs = fx.map_arg((node.args, node.kwargs), _zeros)
        try:  # in grad mode, for some keep nothing otherwise
            values: Sequence[Any] = target(*args, **kwargs)
        except RuntimeError:
            return []
    return [v.numel() * v.element_size() if isinstance(v, Tensor) else 0 for v in values]


def _zeros(source: fx.Node) -> Any:
    like: Tensor = source.meta["val"]
    strides = like.stride()
    return torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device).zero_()
