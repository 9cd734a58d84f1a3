"""Cast once: weights that a step reads in 16 bits only are read so, and cast once an update.

Under torch.autocast every micro-batch casts each weight, and its gradient back:

    before   w16 = _to_copy(w)   ... w16 ...   g16   g = _to_copy(g16)    in each micro-batch
    after                        ... w   ...   g16                        w: a copy of the weights

Keeps:   all numbers: the cast is the same, and a gradient of 16 bits is added to a sum of 32 as it
         is cast and added.
Gains:   two ops for each weight in each micro-batch, which read it whole.
Costs:   the copies, between updates too; Job.precision has the same ones (precision.py).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, fx

_CAST = torch.ops.aten._to_copy.default
_NARROW = (torch.bfloat16, torch.float16)


class _Reading(NamedTuple):
    """The casts of a weight, all alike, and that of its gradient; None: it has none."""

    casts: tuple[fx.Node, ...]
    back: fx.Node | None


def cast_once(graph: fx.Graph, names: Sequence[str], trained: Sequence[str]) -> dict[str, int]:
    """Let a step read weights in 16 bits that it only casts to these; return their bytes in 32.

    names:    of the parameters, which are the first placeholders.
    trained:  those of which the step gives gradients, in the order of its results, behind the loss.
    """
    results = graph.output_node().args[0]
    assert isinstance(results, list | tuple), "a step has several results"
    gradients = dict(zip(trained, results[1:], strict=False))
    found: dict[str, int] = {}
    for name, node in zip(names, graph.find_nodes(op="placeholder"), strict=False):
        reading = _reading(node, gradients.get(name))
        if reading is None:
            continue
        found[name] = node.meta["val"].nbytes
        node.meta["val"] = reading.casts[0].meta["val"]
        for cast in reading.casts:
            cast.replace_all_uses_with(node)
            graph.erase_node(cast)
        if reading.back is not None:
            reading.back.replace_all_uses_with(reading.back.all_input_nodes[0])
            graph.erase_node(reading.back)
    return found


def _reading(node: fx.Node, gradient: object) -> _Reading | None:
    """Return the casts by which a weight is read, where they are all to 16 bits of one kind."""
    kept, casts = node.meta["val"], tuple(node.users)
    if kept.dtype != torch.float32 or not casts or not all(map(_is_cast, casts)):
        return None
    (dtype, *others) = {cast.meta["val"].dtype for cast in casts}
    if others or dtype not in _NARROW:
        return None
    if not isinstance(gradient, fx.Node):
        return _Reading(casts, None)
    if not _is_cast(gradient) or [user.op for user in gradient.users] != ["output"]:
        return None
    value = gradient.all_input_nodes[0].meta["val"]
    alike = value.dtype == dtype and value.shape == kept.shape
    return _Reading(casts, gradient) if alike and _lies_as(value, gradient) else None


def _is_cast(node: fx.Node) -> bool:
    """Return whether an op changes nothing but a dtype."""
    if node.target != _CAST:
        return False
    given = node.all_input_nodes[0].meta["val"]
    same = {"layout": given.layout, "device": given.device}
    others = {key: value for key, value in node.kwargs.items() if key != "dtype"}
    return all(value is None or value == same.get(key) for key, value in others.items())


def _lies_as(value: Tensor, node: fx.Node) -> bool:
    return value.stride() == node.meta["val"].stride()
