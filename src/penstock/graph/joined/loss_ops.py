"""Losses: those that torch makes in one op, of all samples at once, each micro-batch its own mean.

A loss over classes is a mean over the labels that count, of which each micro-batch has its own
number:

    before   loss = nll_loss(mean) of a micro-batch
    after    numbers = nll_loss(none) of all samples;  those of each micro-batch, summed up, by how
             many labels of it count

and the gradient of each sample is scaled so.  A micro-batch without any such label has no loss
(nan) and no gradient, as alone.
"""

import operator
from math import prod
from typing import Any

import torch
from torch import fx

from penstock.graph.by_rows import LOSS_BACKWARD
from penstock.graph.dims import aten, shape_of
from penstock.graph.joined.joiner import Abreast, Apart, Joiner, Rule, Sealed, Several, State

_NONE, _MEAN, _SUM = 0, 1, 2  # kinds of reduction
FORWARD_OF_CLASSES = aten.nll_loss_forward.default, aten.nll_loss2d_forward.default
BACKWARD_OF_CLASSES = (
    aten.nll_loss_backward.default,
    aten.nll_loss2d_backward.default,
    LOSS_BACKWARD,
)


def of_classes(made: Joiner, node: fx.Node) -> State | None:
    """Return the loss of each micro-batch and how many labels count in it."""
    source, labels, weight, reduction, ignored = node.args
    found = with_labels(made, node, source, labels)  # pyright: ignore[reportArgumentType]
    if found is None or weight is not None or len(shape_of(labels)) == 0:  # pyright: ignore
        return None
    whole = made.op(node, node.target, *found, None, _NONE, ignored)
    each = made.op(node, operator.getitem, whole, 0)
    count = made.op(node, operator.getitem, whole, 1)
    if reduction == _NONE:
        return Several((Abreast(each, 0), Sealed(count)))
    counts = made.op(node, aten.ne.Scalar, found[1], ignored)
    counts = _summed_up(made, node, counts)
    counts = made.op(node, aten._to_copy.default, counts, dtype=each.meta["val"].dtype)
    losses = _summed_up(made, node, each)
    if reduction == _MEAN:
        losses = made.op(node, aten.div.Tensor, losses, counts)
        made.totals[node] = counts
    return Several((_taken_apart(made, node, losses), _taken_apart(made, node, counts)))


def with_labels(
    made: Joiner, node: fx.Node, source: fx.Node, labels: fx.Node
) -> tuple[fx.Node, fx.Node] | None:
    """Return log-probabilities and labels of all samples, the former beside one another already."""
    if made.dim_of(source) != 0 or len(shape_of(source)) < 2:
        return None
    one, other = made.beside(source, 0, node), made.beside(labels, 0, node)
    return None if one is None or other is None else (one, other)


def _summed_up(made: Joiner, node: fx.Node, each: fx.Node) -> fx.Node:
    """Return the sums of each micro-batch, as one vector."""
    rows = made.op(node, aten.view.default, each, [made.count, -1])
    return made.op(node, aten.sum.dim_IntList, rows, [1])


def _taken_apart(made: Joiner, node: fx.Node, vector: fx.Node) -> Apart:
    parts = (made.op(node, aten.select.int, vector, 0, at) for at in range(made.count))
    return Apart(tuple(parts))


def of_classes_backward(made: Joiner, node: fx.Node) -> State | None:
    """Return the gradient of the log-probabilities (or of the logits) of all samples."""
    gradient, source, labels, weight, reduction, ignored, _ = node.args
    found = with_labels(made, node, source, labels)  # pyright: ignore[reportArgumentType]
    if found is None or weight is not None or len(shape_of(labels)) == 0:  # pyright: ignore
        return None
    if reduction == _NONE:
        given = made.beside(gradient, 0, node)  # pyright: ignore[reportArgumentType]
    else:
        given = _of_each(made, node, is_mean=bool(reduction == _MEAN))
    if given is None:
        return None
    whole = _unread(made, node, found[0])
    return made.beside_op(node, (0, 1), (given, *found, None, _NONE, ignored, whole))


def _unread(made: Joiner, node: fx.Node, source: fx.Node) -> fx.Node:
    """Return a placeholder for the number of labels that count, where no mean is taken."""
    value = source.meta["val"]
    alike = {"dtype": value.dtype, "device": value.device}
    return made.op(node, aten.scalar_tensor.default, 1.0, **alike)


def _of_each(made: Joiner, node: fx.Node, *, is_mean: bool) -> fx.Node | None:
    """Return the gradient of the loss of each sample, from those of each micro-batch."""
    gradient, labels, total = node.args[0], node.args[2], node.args[6]
    size = shape_of(labels)  # pyright: ignore[reportArgumentType]
    scales = _vector(made, node, gradient)  # pyright: ignore[reportArgumentType]
    if is_mean:
        counts = _vector(made, node, total)  # pyright: ignore[reportArgumentType]
        scales = made.op(node, aten.div.Tensor, scales, counts)
    return _repeated(made, node, scales, size)


def _vector(made: Joiner, node: fx.Node, source: fx.Node) -> fx.Node:
    """Return a number of each micro-batch, as one vector or one number."""
    known = next((made.totals[k] for k in made.totals if _is_total(source, k)), None)
    if known is not None:
        return known
    if made.is_same(source):
        return made.same(source)
    rows = [made.op(node, aten.view.default, one, [1]) for one in made.apart(source, node)]
    return made.op(node, aten.cat.default, rows)


def _is_total(source: fx.Node, loss: fx.Node) -> bool:
    return source.args == (loss, 1)


def _repeated(made: Joiner, node: fx.Node, scales: fx.Node, size: tuple[int, ...]) -> fx.Node:
    """Return a number of each micro-batch for each number of a shape of its own."""
    wide = made.wide(size, 0)
    if not scales.meta["val"].dim():
        return made.op(node, aten.expand.default, scales, wide)
    rows = made.op(node, aten.unsqueeze.default, scales, 1)
    rows = made.op(node, aten.expand.default, rows, [made.count, prod(size)])
    rows = made.op(node, aten.clone.default, rows, memory_format=torch.contiguous_format)
    return made.op(node, aten.view.default, rows, wide)


def of_pairs_backward(made: Joiner, node: fx.Node) -> State | None:
    """Return the gradient of a loss of pairs of numbers, which is a mean or a sum over them."""
    gradient, source, other, reduction, *more = node.args
    dim, size = made.dim_of(source), shape_of(source)  # pyright: ignore[reportArgumentType]
    if dim != 0 or shape_of(other) != size:  # pyright: ignore[reportArgumentType]
        return None
    one, two = made.beside(source, 0, node), made.beside(other, 0, node)  # pyright: ignore
    if reduction == _NONE:
        given = made.beside(gradient, 0, node)  # pyright: ignore[reportArgumentType]
    else:
        scales = _vector(made, node, gradient)  # pyright: ignore[reportArgumentType]
        if reduction == _MEAN:
            scales = made.op(node, aten.mul.Tensor, scales, 1.0 / prod(size))
        given = _repeated(made, node, scales, size)
    if one is None or two is None or given is None:
        return None
    return made.beside_op(node, (0, 1), (given, one, two, _NONE, *more))


RULES: dict[Any, Rule] = {
    **dict.fromkeys(FORWARD_OF_CLASSES, of_classes),
    **dict.fromkeys(BACKWARD_OF_CLASSES, of_classes_backward),
    aten.mse_loss_backward.default: of_pairs_backward,
    aten.smooth_l1_loss_backward.default: of_pairs_backward,
    aten.huber_loss_backward.default: of_pairs_backward,
}
