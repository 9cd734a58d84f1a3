"""Rules: the results of ops on values of several micro-batches that stand side by side.

elementwise, views            of all at once
along other dims              softmax, sort, a sum over columns, cat of columns: of all at once
products                      by rows, or by columns; where the samples are summed up, the sum
of samples                    convolutions, norms, pooling, attention: batched.py
losses over classes           loss_ops.py
all else                      once for each micro-batch (joiner.py)
"""

from collections.abc import Iterable
from math import prod
from typing import Any

from torch import fx

from penstock.graph.dims import (
    PRODUCTS,
    SIZED,
    SUMS,
    VIEWS,
    aten,
    is_elementwise,
    shape_of,
    view_dim,
)
from penstock.graph.joined import along, batched, loss_ops
from penstock.graph.joined.joiner import Abreast, Joiner, State, SumOfAll, is_tensor, replaced

_PLAIN = (  # elementwise, and not tagged so
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.elu_backward.default,
    aten.softplus_backward.default,
    aten.mish_backward.default,
    aten.softshrink_backward.default,
    aten.hardshrink_backward.default,
    aten.log_sigmoid_backward.default,
    aten.copy.default,
    aten.complex.default,
    aten._conj.default,
    aten.polar.default,
)
OF_PAIRS = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.huber_loss.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
)


def ruled(made: Joiner, node: fx.Node) -> State | None:
    """Return the result of an op on values that stand side by side; None: no rule knows the op."""
    target = node.target
    if target in VIEWS:
        return viewed(made, node)
    if target in PRODUCTS:
        return product(made, node)
    if target in SUMS:
        return sums(made, node)
    if target is aten.bmm.default:
        return batched_product(made, node)
    if is_tensor(node) and (is_elementwise(target) or target in _PLAIN or _is_pair_by_pair(node)):
        return elementwise(made, node)
    for rules in (along.RULES, batched.RULES, loss_ops.RULES):
        if target in rules:
            return rules[target](made, node)
    return None


def _is_pair_by_pair(node: fx.Node) -> bool:
    """Return whether an op is a loss of each pair of numbers by itself."""
    return node.target in OF_PAIRS and along.argument(node, "reduction") == 0


def elementwise(made: Joiner, node: fx.Node) -> State | None:
    """Return the result of an elementwise op on values side by side; None: they are not."""
    shape = shape_of(node)
    at = _first(_place_in(made, each, shape) for each in node.all_input_nodes)
    if at is None:
        return None
    given: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        one = _operand(made, source, at, node)
        if one is None:
            return None
        given[source] = one
    return made.beside_op(node, at, *replaced(node, given))


def _first(places: Iterable[tuple[int, int] | None]) -> tuple[int, int] | None:
    return next((place for place in places if place is not None), None)


def _place_in(made: Joiner, source: fx.Node, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return along which dim of an elementwise result the samples of an operand are."""
    state, own = made.states[source], shape_of(source)
    if not isinstance(state, Abreast):
        return None
    at = state.dim + len(shape) - len(own)
    return (at, state.outer) if own[state.dim] == shape[at] else None


def _operand(
    made: Joiner, source: fx.Node, place: tuple[int, int], node: fx.Node
) -> fx.Node | None:
    """Return an operand of an elementwise op whose results stand side by side along a dim."""
    (dim, outer), shape, own = place, shape_of(node), shape_of(source)
    at = dim - (len(shape) - len(own))
    if at >= 0 and own[at] == shape[dim] and (shape[dim] > 1 or not made.is_same(source)):
        return made.beside(source, at, node, outer)
    if made.dim_of(source) is not None:
        return None
    return made.same(source) if made.is_same(source) else made.spread(source, place, shape, node)


def viewed(made: Joiner, node: fx.Node) -> State | None:
    """Return a view of values beside one another; None where it mixes them."""
    source: Any = node.args[0]
    state, old, new = made.states[source], shape_of(source), shape_of(node)
    if not isinstance(state, Abreast):
        return None
    if old == new and _is_whole(node, state.dim, old):
        return state
    at = _view_place(node, old, state, new)
    if at is None:
        return None
    args: list[Any] = [state.node, *node.args[1:]]
    if node.target in SIZED:
        args[1] = made.wide(new, at[0])
    return made.beside_op(node, at, tuple(args))


def _is_whole(node: fx.Node, dim: int, shape: tuple[int, ...]) -> bool:
    """Return whether a view is a slice of all that there is along a dim, or the gradient of it."""
    more: Any = node.args[1:]
    if node.target is aten.slice_backward.default:
        more = more[1:]
    elif node.target is not aten.slice.Tensor:
        return False
    given: tuple[Any, ...] = (*more, *(0, None, None, 1)[len(more) :])
    at, start, end, step = given
    whole: bool = start in (None, 0) and (end is None or end >= shape[dim]) and step == 1
    return whole and bool(at % len(shape) == dim)


def _view_place(
    node: fx.Node, old: tuple[int, ...], state: Abreast, new: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return along which dim of a view the samples are, in how many pieces; None: along none."""
    if node.target in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        if state.outer == 1 and (known := view_dim(node, old, state.dim, new)) is not None:
            return known, 1
        return reshaped(old, (state.dim, state.outer), new)
    dim = view_dim(node, old, state.dim, new)
    return None if dim is None else (dim, state.outer)


def reshaped(
    old: tuple[int, ...], place: tuple[int, int], new: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return where in another shape of the same numbers is what stands at a place of this one.

    Micro-batches stand beside one another after so many numbers of the dims before, and pieces.
    """
    dim, outer = place
    left, before = prod(old[:dim]) * outer, 1
    found: tuple[int, int] | None = None
    for at, size in enumerate(new):
        pieces, rest = divmod(left, before)
        if before <= left and rest == 0 and size % pieces == 0:
            found = at, pieces
            if pieces < size:
                break
        before *= size
    return found


def product(made: Joiner, node: fx.Node) -> State | None:
    """Return a product A B, or bias + A B, by rows of A or columns of B, or summed over samples."""
    *bias, left, right = node.args
    if not isinstance(left, fx.Node) or not isinstance(right, fx.Node):
        return None
    outer = made.outer_of((left, right))
    found: State | None = None
    if made.is_same(right):
        args = [*bias, made.beside(left, 0, node, outer), made.same(right)]
        found = _by(made, node, (0, outer), args)
    elif made.is_same(left):
        args = [*bias, made.same(left), made.beside(right, 1, node, outer)]
        found = _by(made, node, (1, outer), args)
    return found if found or bias else _summed(made, node, (left, 1), (right, 0))


def _by(made: Joiner, node: fx.Node, place: tuple[int, int], args: list[Any]) -> State | None:
    if None in args:
        return None
    if len(args) > 2:
        args[0] = _operand(made, args[0], place, node)
    return None if None in args else made.beside_op(node, place, tuple(args))


def _summed(
    made: Joiner, node: fx.Node, left: tuple[fx.Node, int], right: tuple[fx.Node, int]
) -> SumOfAll | None:
    if node not in made.to_sum:
        return None
    outer = made.outer_of((left[0], right[0]))
    one, other = made.beside(*left, node, outer), made.beside(*right, node, outer)
    if one is None or other is None:
        return None
    return made.sum_op(node, (one, other))


def batched_product(made: Joiner, node: fx.Node) -> State | None:
    """Return the products of several pairs of matrices."""
    left, right = node.all_input_nodes[0], node.all_input_nodes[-1]
    dims, outer = (made.dim_of(left), made.dim_of(right)), made.outer_of((left, right))
    if made.is_same(right) and dims[0] != 0:
        args = [made.beside(left, 1, node, outer), made.same(right)]
        return _by(made, node, (1, outer), args)
    if made.is_same(left) and dims[1] != 0:
        args = [made.same(left), made.beside(right, 2, node, outer)]
        return _by(made, node, (2, outer), args)
    if 0 not in dims and node in made.to_sum:
        return _summed(made, node, (left, 2), (right, 1))
    args = [made.beside(each, 0, node, outer) for each in (left, right)]
    return _by(made, node, (0, outer), args)


def sums(made: Joiner, node: fx.Node) -> State | None:
    """Return a sum over other dims than the samples', or over all samples where those are added."""
    found, state = along.reduced(made, node), made.states[node.all_input_nodes[0]]
    if found is None and node in made.to_sum and isinstance(state, Abreast):
        return made.sum_op(node, (state.node, *node.args[1:]))
    return found
