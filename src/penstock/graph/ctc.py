"""CTC: the loss of sequences that nobody has aligned, as ops whose results have a shape.

What torch keeps for its backward is as wide as the longest target of the batch, which no trace
knows.  Here it is as wide as the longest that targets of this shape may hold, and the rest of it
is zero:

    nll, alpha = _ctc_loss(x, y, lengths, widths)   becomes   nll, alpha = penstock.ctc_loss(...)

Keeps:   every bit: torch's own ops compute both.
Costs:   a copy of what is kept, and its rest.
Ignores: lengths that are numbers of Python, which a trace freezes.
"""

from typing import Any

import torch
from torch import Tensor, fx

from penstock import _compat
from penstock.graph.by_rows import LIBRARY

aten = torch.ops.aten

_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
LIBRARY.define(f"ctc_loss({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)")
LIBRARY.define(
    f"ctc_loss_backward(Tensor grad, {_GIVEN}, Tensor neg_log_likelihood, Tensor log_alpha,"
    " int blank, bool zero_infinity) -> Tensor"
)


def ctc_loss(
    log_probs_TNC: Tensor,
    targets: Tensor,
    input_lengths_N: Tensor,
    target_lengths_N: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """Return the negative log likelihood of each sample, and what the backward needs.

    Source:   as aten._ctc_loss, whose arguments these are.
    """
    lengths = input_lengths_N, target_lengths_N
    nll, narrow = aten._ctc_loss.Tensor(log_probs_TNC, targets, *lengths, blank, zero_infinity)
    _, kept = _shapes(log_probs_TNC, targets)
    kept.zero_()
    kept[..., : narrow.shape[-1]] = narrow
    return nll, kept


def ctc_loss_backward(
    grad_N: Tensor,
    log_probs_TNC: Tensor,
    targets: Tensor,
    lengths_N: Tensor,
    target_lengths_N: Tensor,
    *rest: Any,
) -> Tensor:
    """Return the gradient of the log probabilities.

    rest:     the two results of `ctc_loss`, and its last two arguments.
    Source:   as aten._ctc_loss_backward, whose arguments these are.
    """
    nll_N, kept, blank, zero_infinity = rest
    narrow = kept[..., : 2 * int(target_lengths_N.max()) + 1].contiguous()
    backward: Any = aten._ctc_loss_backward.Tensor
    given = grad_N, log_probs_TNC, targets, lengths_N, target_lengths_N, nll_N, narrow
    return backward(*given, blank, zero_infinity)


def _shapes(log_probs_TNC: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return tensors of the shapes of both results: 2 * most + 1 places, a blank beside each."""
    steps, samples, _ = log_probs_TNC.shape
    width = 2 * targets.shape[-1] + 1
    return log_probs_TNC.new_empty(samples), log_probs_TNC.new_empty(samples, steps, width)


def _only_shapes(log_probs: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _shapes(log_probs, targets)


def _only_the_shape(grad: Tensor, log_probs: Tensor, *_: object) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


for device in ("CPU", "CUDA"):
    LIBRARY.impl("ctc_loss", ctc_loss, device)
    LIBRARY.impl("ctc_loss_backward", ctc_loss_backward, device)
LIBRARY.impl("ctc_loss", _only_shapes, "Meta")
LIBRARY.impl("ctc_loss_backward", _only_the_shape, "Meta")

_OURS: dict[Any, Any] = {
    aten._ctc_loss.Tensor: torch.ops.penstock.ctc_loss.default,
    aten._ctc_loss_backward.Tensor: torch.ops.penstock.ctc_loss_backward.default,
}


def widen_kept(graph: fx.Graph) -> None:
    """Let each CTC loss whose lengths are tensors, and its backward, be ours."""
    for node in graph.nodes:
        if node.target in _OURS:
            node.args = (*node.args, *_defaults(node))
            node.kwargs, node.target = {}, _OURS[node.target]


def _defaults(node: fx.Node) -> list[Any]:
    """Return the arguments that a call leaves out."""
    theirs, own = _compat.schema_of(node.target), _compat.schema_of(_OURS[node.target])
    left_out = {each.name: each.default_value for each in theirs.arguments}
    named = {**left_out, **node.kwargs}
    return [named[each.name] for each in own.arguments[len(node.args) :]]
