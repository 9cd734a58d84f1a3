"""Sums: whether a traced loss may be a sum over the samples of its batch, by the ops behind it."""

import operator
from typing import Any

from torch import fx

from penstock.graph.trace import Capture

_SUM = 2  # in place of a mean, among the arguments of ATen's losses
_SHAPES = {"alias", "detach", "view", "reshape", "clone", "_to_copy", "squeeze", "unsqueeze", "neg"}
_LOSSES = {
    "mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss",
    "binary_cross_entropy_with_logits", "nll_loss_forward", "nll_loss2d_forward",
    "multi_margin_loss", "multilabel_margin_loss_forward",
}  # fmt: skip


def sums_over_batch(captured: Capture) -> bool:
    """Return whether the loss, or a term of it, is a sum that no number of samples divides.

    A sum over other dimensions alone looks the same: whoever acts by this asks the loss, too.
    """
    loss = captured.fx_nodes[captured.graph.loss]
    return _sums(loss, max(captured.graph.samples, 2))


def _sums(node: Any, samples: int) -> bool:
    """Return whether the value of a node is a sum that is not divided by `samples` or more."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    first, second = (*node.args, None, None)[:2]
    if node.target is operator.getitem:
        return _sums(first, samples)
    match name := str(node.target).split(".")[1]:
        case "sum":
            return not _is_divided(first, samples)
        case "add" | "sub":
            return _sums(first, samples) or _sums(second, samples)
        case "mul":
            scale = second if isinstance(second, int | float) else 1.0
            divided = abs(scale) * samples <= 1.0
            return not divided and (_sums(first, samples) or _sums(second, samples))
        case "div":
            by = second if isinstance(second, int | float) else float("inf")  # what is counted
            return abs(by) < samples and _sums(first, samples)
        case _ if name in _LOSSES:
            return _SUM in (*node.args[2:], *node.kwargs.values())
        case _:
            return name in _SHAPES and _sums(first, samples)


def _is_divided(node: Any, samples: int) -> bool:
    """Return whether a sum is already a mean: divided by `samples` before, or made of means."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        first, second = (*node.args, None, None)[:2]
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        number = second if isinstance(second, int | float) else None
        if name == "div" and number is not None and abs(number) >= samples:
            return True
        if name == "mul" and number is not None and abs(number) * samples <= 1.0:
            return True
        if name not in _SHAPES and (name not in ("div", "mul") or number is None):
            return False
        node = first
    return False
