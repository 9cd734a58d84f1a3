"""Over samples: the share that a part of a micro-batch adds to a sum, mean or loss over samples.

sum            the sum over the part
mean           the mean over the part, divided by the number of parts
loss           likewise; one over classes is a mean over the labels that count, of which the
               whole batch says how many there are
its gradient   that of each sample, as in the whole micro-batch
"""

import operator
from typing import Any

from torch import fx

from penstock import _compat
from penstock.graph.dims import aten, shape_of
from penstock.graph.joined.along import argument, dims_of
from penstock.graph.joined.divider import ALIKE, CouplesError, Divider
from penstock.graph.joined.joiner import Abreast, Joiner, Same, Several, State, SumOfAll
from penstock.graph.joined.joining_rules import OF_PAIRS, ruled
from penstock.graph.joined.loss_ops import BACKWARD_OF_CLASSES, FORWARD_OF_CLASSES, with_labels

_NONE, _MEAN = 0, 1  # kinds of reduction; 2: a sum
_MEANS = aten.mean.default, aten.mean.dim
_PAIRS_BACKWARD = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy_backward.default,
)


def of_part(made: Joiner, node: fx.Node) -> State | None:
    """Return the result of an op on the rows of a part; None: no rule knows the op."""
    assert isinstance(made, Divider), "these rules are of parts"
    try:
        return _of_part(made, node)
    except CouplesError:
        return None


def _of_part(made: Divider, node: fx.Node) -> State | None:
    if node not in made.of_batch and (drawn := _drawn(made, node)) is not None:
        return drawn
    target, found = node.target, ruled(made, node) if node.target not in _OWN else None
    if found is not None or node in made.of_batch:
        return found
    if target in _MEANS:
        return _mean(made, node)
    if target in _OWN and argument(node, "reduction") == _NONE:
        return ruled(made, node)
    if target in OF_PAIRS:
        return _of_pairs(made, node)
    if target in _PAIRS_BACKWARD:
        return _of_pairs_backward(made, node)
    if target in FORWARD_OF_CLASSES:
        return _of_classes(made, node)
    return _of_classes_backward(made, node) if target in BACKWARD_OF_CLASSES else None


def _drawn(made: Divider, node: fx.Node) -> State | None:
    """Return random numbers for the whole micro-batch, or the tensor whose shape they take.

    So the samples of a part have the very numbers that they have in the whole.  Only shape and
    layout of that tensor count.
    """
    if node.target in _LIKE:
        blank = made.blank(node, node.all_input_nodes[0])
        return Same(made.copied(node, lambda _: blank))
    if node.target not in ALIKE or not any(map(_draws, node.users)):
        return None
    blank = made.blank(node, node)
    if node.target is aten.empty_like.default:
        return Same(blank)
    return Same(made.op(node, node.target, blank, *node.args[1:], **node.kwargs))


def _draws(node: fx.Node) -> bool:
    return _compat.draws_random(node.target, node.args, node.kwargs)


_LIKE = (
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
_OWN = (*OF_PAIRS, *_PAIRS_BACKWARD, *FORWARD_OF_CLASSES, *BACKWARD_OF_CLASSES)


def _mean(made: Divider, node: fx.Node) -> State | None:
    (source,) = node.all_input_nodes
    state = made.states[source]
    if not isinstance(state, Abreast) or state.dim not in dims_of(node, len(shape_of(source))):
        return None
    found = made.sum_op(node, (state.node, *node.args[1:]))
    return None if found is None else _scaled(made, node, found.node)


def _scaled(made: Divider, node: fx.Node, mean: fx.Node) -> SumOfAll:
    return SumOfAll(made.op(node, aten.mul.Tensor, mean, made.times))


def _rows(made: Divider, node: fx.Node, given: Any) -> list[Any] | None:
    """Return arguments of a loss of pairs with the rows of this part of all that has some."""
    tensors = [each for each in given if isinstance(each, fx.Node)]
    shape, outer = shape_of(tensors[0]), made.outer_of(tensors)
    dim = next((d for each in tensors if (d := made.dim_of(each)) is not None), None)
    if dim is None:
        return None
    found: list[Any] = []
    for each in given:
        one = each
        if isinstance(each, fx.Node):
            own = shape_of(each)
            at = dim - (len(shape) - len(own))
            if at >= 0 and own[at] == shape[dim]:
                one = made.beside(each, at, node, outer)
            else:
                one = made.same(each) if made.is_same(each) else None
            if one is None:
                return None
        found.append(one)
    return found


def _of_pairs(made: Divider, node: fx.Node) -> State | None:
    args = _rows(made, node, node.args)
    found = None if args is None or node.kwargs else made.sum_op(node, tuple(args))
    if found is None or argument(node, "reduction") != _MEAN:
        return found
    return _scaled(made, node, found.node)


def _of_pairs_backward(made: Divider, node: fx.Node) -> State | None:
    gradient, *others = node.args
    args = _rows(made, node, others)
    if args is None or node.kwargs or not made.is_same(gradient):
        return None
    given = made.same(gradient)  # pyright: ignore[reportArgumentType]
    if argument(node, "reduction") == _MEAN:
        given = made.op(node, aten.mul.Tensor, given, made.times)
    dim = next(d for each in others if (d := made.dim_of(each)) is not None)
    outer = made.outer_of(node.all_input_nodes)
    return made.beside_op(node, (dim, outer), (given, *args))


def _of_classes(made: Divider, node: fx.Node) -> State | None:
    """Return the loss over classes: the share of the part, and the weight of all labels."""
    source, labels, weight, reduction, ignored = _untyped(node.args)
    found = with_labels(made, node, source, labels)
    if found is None or not made.is_same(weight):
        return None
    if labels not in made.of_batch and not made.is_same(labels):
        return None
    own = None if weight is None else made.same(weight)
    total = _total(made, node, made.whole(labels), own, ignored)
    both = made.op(node, node.target, *found, own, 2, ignored)
    loss = made.op(node, operator.getitem, both, 0)
    if reduction == _MEAN:
        loss = made.op(node, aten.div.Tensor, loss, total)
    return Several((SumOfAll(loss), Same(total)))


def _total(
    made: Divider, node: fx.Node, labels: fx.Node, weight: fx.Node | None, ignored: int
) -> fx.Node:
    """Return the sum of the weights of the labels of the whole micro-batch that count."""
    dtype = node.all_input_nodes[0].meta["val"].dtype
    counts = made.op(node, aten.ne.Scalar, labels, ignored)
    if weight is None:
        counts = made.op(node, aten.sum.default, counts)
        return made.op(node, aten._to_copy.default, counts, dtype=dtype)
    known = made.op(node, aten.mul.Tensor, labels, counts)
    flat = made.op(node, aten.reshape.default, known, [-1])
    each = made.op(node, aten.index_select.default, weight, 0, flat)
    counts = made.op(node, aten.reshape.default, counts, [-1])
    return made.op(node, aten.sum.default, made.op(node, aten.mul.Tensor, each, counts))


def _of_classes_backward(made: Divider, node: fx.Node) -> State | None:
    gradient, source, labels, weight, *more, total = _untyped(node.args)
    found = with_labels(made, node, source, labels)
    if found is None or not made.is_same(gradient, weight, total):
        return None
    own = None if weight is None else made.same(weight)
    args = (made.same(gradient), *found, own, *more, made.same(total))
    return made.beside_op(node, (0, 1), args)


def _untyped(args: Any) -> Any:
    return args
