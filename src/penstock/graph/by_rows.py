"""By rows: the backward of a loss over classes, made for some rows at a time.

The gradient of `nll_loss` is as large as the logits and holds one number a row.  The backward of
`log_softmax` is all that reads it, so both become one op, which makes it for so many rows as stay
in a cache:

    nll = nll_loss_backward(...)                 one tensor of the size of the logits
    out = _log_softmax_backward_data(nll, ...)   becomes   out = penstock.loss_backward(...)

Keeps:   every bit: neither op looks from one row to another.
Gains:   where the loss of a language model holds most, a third of what it makes; a fifth of its
         time, for what was written is still in a cache when it is read.
Costs:   two calls for each MiB of logits.
Ignores: losses over images (`nll_loss2d`), and those with another op in between.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

_CACHED_BYTES = 1 << 20  # of one gradient that is made at once

LIBRARY: Any = torch.library.Library("penstock", "DEF")
LIBRARY.define(
    "loss_backward(Tensor grad, Tensor output, Tensor target, Tensor? weight, int reduction,"
    " int ignore_index, Tensor total_weight) -> Tensor"
)


def loss_backward(  # noqa: PLR0913 - as torch's own op has them
    grad: Tensor,
    output_NC: Tensor,
    target_N: Tensor,
    weight_C: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of what `log_softmax` was given, [N, C], where `nll_loss` follows it.

    grad:     of the loss: a number, or [N] with `reduction` 0.
    Source:   as aten.nll_loss_backward, whose arguments these are, and _log_softmax_backward_data.
    """
    made = torch.empty_like(output_NC)
    step = max(1, _CACHED_BYTES // max(1, output_NC.shape[1] * output_NC.itemsize))
    for first in range(0, len(output_NC), step):
        rows = slice(first, first + step)
        own = grad[rows] if reduction == 0 else grad
        part = output_NC[rows]
        given = own, part, target_N[rows], weight_C, reduction, ignore_index, total_weight
        nll = aten.nll_loss_backward.default(*given)
        softmax: Any = aten._log_softmax_backward_data.out
        softmax(nll, part, 1, output_NC.dtype, out=made[rows])
        del nll  # or two of them would be held
    return made


LIBRARY.impl("loss_backward", loss_backward, "CompositeExplicitAutograd")
LOSS_BACKWARD: Any = torch.ops.penstock.loss_backward.default


def join_losses(graph: fx.Graph) -> None:
    """Make one op of each backward of a loss and the softmax before it."""
    for node in list(graph.nodes):
        if node.target is not aten._log_softmax_backward_data.default:
            continue
        nll, output, dim, dtype = node.args
        value = output.meta["val"]
        alone = nll.target is aten.nll_loss_backward.default and len(nll.users) == 1
        if not alone or nll.kwargs or nll.args[1] is not output:
            continue
        if value.dim() != 2 or dim not in (1, -1):
            continue
        if value.dtype != dtype or value.numel() * value.element_size() <= _CACHED_BYTES:
            continue
        with graph.inserting_before(node):
            joined = graph.call_function(LOSS_BACKWARD, nll.args)
        joined.meta = dict(node.meta)
        node.replace_all_uses_with(joined)
        graph.erase_node(node)
        graph.erase_node(nll)


def taken_apart(graph: fx.Graph, arguments: Sequence[Any], dtype: torch.dtype) -> fx.Node:
    """Return the last of the two ops of which one is made above, put at the end of a graph.

    A compiler makes neither gradient where it knows both ops.
    """
    nll = graph.call_function(aten.nll_loss_backward.default, tuple(arguments))
    rest = nll, arguments[1], 1, dtype
    return graph.call_function(aten._log_softmax_backward_data.default, rest)
