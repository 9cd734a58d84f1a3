"""Counted: by which numbers of a batch a traced loss is divided, as by the tokens that it counts.

A mean over what a batch holds of something, of which another holds more or less: the mean of such
means over the micro-batches of a step is not the mean over the step.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from penstock.graph.trace import Capture

_MEAN = 1  # among the arguments of ATen's losses
_THROUGH = {"alias", "detach", "view", "reshape", "clone", "_to_copy", "squeeze", "unsqueeze",
            "neg", "mul", "add", "sub"}  # fmt: skip


class CountNode(NamedTuple):
    """A value of a traced step that divides the loss.

    node:    it; or labels, of which those count that are not `ignored`.
    """

    node: fx.Node
    ignored: int | None = None


def counts_in(captured: Capture) -> list[CountNode]:
    """Return the values that divide the loss, or a term of it, and are made of the batch alone."""
    inputs = _inputs(captured)
    waiting: list[Any] = [captured.fx_nodes[captured.graph.loss]]
    found: list[CountNode] = []
    while waiting:
        node = waiting.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        if node.target is operator.getitem:
            waiting.append(node.args[0])
            continue
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        if name in ("nll_loss_forward", "nll_loss2d_forward") and node.args[3] == _MEAN:
            found.append(CountNode(node.args[1], int(node.args[4])))  # pyright: ignore
        elif name == "div" and isinstance(node.args[1], fx.Node):
            found.append(CountNode(node.args[1]))
        elif name in _THROUGH:
            waiting += node.args[:2]
    return [each for each in found if _is_of_batch(each.node, inputs)]


def _inputs(captured: Capture) -> dict[fx.Node, int]:
    return {captured.fx_nodes[node]: leaf for node, leaf in captured.inputs.items()}


def _is_of_batch(node: fx.Node, inputs: dict[fx.Node, int]) -> bool:
    """Return whether a value is made of the batch, and of nothing else."""
    if node in inputs:
        return True
    before = node.all_input_nodes
    is_op = node.op == "call_function" and bool(before)
    return is_op and all(_is_of_batch(each, inputs) for each in before)


def count_of(captured: Capture, counts: Sequence[CountNode], batch: object) -> list[float]:
    """Return the numbers for one batch: what divides, or how many labels count.

    Raises:   GraphError: the batch is not like the traced one.
    """
    leaves, inputs = captured.leaves(batch), _inputs(captured)
    known: dict[fx.Node, Any] = {node: leaves[leaf] for node, leaf in inputs.items()}
    return [_number(_value(each.node, known), each.ignored) for each in counts]


def _value(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node not in known:
        args: Any = fx.map_arg(node.args, lambda each: _value(each, known))
        more: Any = fx.map_arg(node.kwargs, lambda each: _value(each, known))
        target: Any = node.target
        known[node] = target(*args, **more)
    return known[node]


def _number(value: Tensor, ignored: int | None) -> float:
    if ignored is not None:
        return float((value != ignored).sum())
    return float(value.double().mean())
