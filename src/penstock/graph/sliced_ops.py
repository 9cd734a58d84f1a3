"""Sliced ops: the results of views, elementwise ops, sums and products on values in slices.

views, elementwise     slice by slice
a product of matrices  in slices where an operand's rows or columns are; a sum over slices where
                       the dim that it sums over is cut
a sum                  slice by slice, or a sum over slices
gradients              of the rows of a slice alone, wherever the whole was made before (`wanted`)
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from penstock.graph.dims import (
    PRODUCTS,
    SIZED,
    SUMS,
    VIEWS,
    is_elementwise,
    shape_of,
    summed_dims,
    view_dim,
)
from penstock.graph.slicing import (
    Ends,
    LogSoftmax,
    NewNode,
    Sliced,
    SliceTurn,
    Slicing,
    State,
    arguments,
    as_node,
    aten,
    sliced_of,
    wide_type,
)
from penstock.graph.trace import Capture


def viewed(made: Slicing, node: fx.Node) -> State | None:
    """Return a view of a value in slices, slice by slice; None where it mixes them."""
    source, shape = as_node(node.args[0]), shape_of(node)
    known, old = made.wanted.get(node), shape_of(source)
    if known is not None:
        back = next((d for d in range(len(old)) if view_dim(node, old, d, shape) == known[0]), None)
        sliced = None if back is None else made.slices(source, back, known[1], node)
    else:
        state = made.states[source]
        sliced = made.in_slices(state) if isinstance(state, Sliced | LogSoftmax) else None
    dim = None if sliced is None else view_dim(node, old, sliced.dim, shape)
    if sliced is None or dim is None:
        return None
    rows = sorted(made.turns(sliced, node), key=lambda row: row[0].number)
    more = {turn: _view_args(node, dim, part.value, sliced.dim) for turn, part in rows}
    if sliced.of_state:
        named = node.kwargs
        own = tuple(made.of_state(turn, node, (part, *more[turn]), named) for turn, part in rows)
        return Sliced(dim, sliced.ends, own, of_state=True)
    parts = {turn: made.of(turn, node, node.target, part, *more[turn]) for turn, part in rows}
    return sliced_of(dim, sliced.ends, parts)


def elementwise(made: Slicing, node: fx.Node) -> State | None:
    """Return the result of an elementwise op, slice by slice, from its inputs' slices."""
    shape, found = shape_of(node), _cut_of(made, node)
    if found is None:
        return None
    dim, ends = found
    given: dict[fx.Node, Sliced | NewNode] = {}
    for source in node.all_input_nodes:
        at = _dim_before(source, dim, shape)
        sliced = None if at is None else made.slices(source, at, ends, node)
        if at is not None and sliced is None:
            return None
        given[source] = made.whole(source, node) if sliced is None else sliced
    cut = [each for each in given.values() if isinstance(each, Sliced)]
    if all(each.of_state for each in cut):
        return _of_state(made, node, cut[0]) if len(given) == 1 else None
    parts: dict[SliceTurn, NewNode] = {}
    for turn, _ in made.turns(_first_run(made, node, cut), node):
        own = {k: v if isinstance(v, NewNode) else v.parts[turn.number] for k, v in given.items()}
        args, kwargs = arguments(node, own)
        parts[turn] = made.of(turn, node, node.target, *args, **kwargs)
    return sliced_of(dim, ends, parts)


def summed(made: Slicing, node: fx.Node) -> State | None:
    """Return a sum: slice by slice, or over the slices where their dim is among those summed."""
    source, known = as_node(node.args[0]), made.wanted.get(node)
    count, over, keeps = summed_dims(node)
    state = made.states[source]
    if isinstance(state, Sliced | LogSoftmax):
        sliced = made.in_slices(state)
    elif known is None:
        return None
    else:
        left = [d for d in range(count) if keeps or d not in over]
        sliced = made.slices(source, left[known[0]], known[1], node)
    if sliced is None:
        return None
    each = {
        turn: made.of(turn, node, node.target, part, *node.args[1:], **node.kwargs)
        for turn, part in made.turns(sliced, node)
    }
    if sliced.dim not in over:
        dim = sliced.dim if keeps else sliced.dim - sum(d < sliced.dim for d in over)
        return sliced_of(dim, sliced.ends, each)
    return _added_up(made, node, each)


def product(made: Slicing, node: fx.Node) -> State | None:
    """Return a product A B, or bias + A B, by rows of A or columns of B, or summed over both."""
    *bias, left, right = map(as_node, node.args)
    dim, known = made.wanted.get(node, (-1, None))
    rows = made.cut_at(left, 0) or (known if dim == 0 else None)
    columns = made.cut_at(right, 1) or (known if dim == 1 else None)
    inner = made.cut_at(left, 1) or made.cut_at(right, 0)
    match (rows, columns, inner):
        case (tuple(), None, None):
            cut, ends, at = made.slices(left, 0, rows, node), rows, 0
            other = made.whole(right, node)
        case (None, tuple(), None):
            cut, ends, at = made.slices(right, 1, columns, node), columns, 1
            other = made.whole(left, node)
        case (None, None, tuple()):
            return _over(made, node, bias, (left, right), inner)
        case _:
            return None
    if cut is None:
        return None
    parts: dict[SliceTurn, NewNode] = {}
    added = _bias(made, node, bias, at, ends)
    for turn, part in made.turns(cut, node):
        pair = (part, other) if at == 0 else (other, part)
        parts[turn] = made.of(turn, node, node.target, *added(turn), *pair, **node.kwargs)
    return sliced_of(at, ends, parts)


def _over(
    made: Slicing,
    node: fx.Node,
    bias: Sequence[fx.Node],
    of: tuple[fx.Node, fx.Node],
    ends: Ends,
) -> NewNode | None:
    """Return a product whose inner dim is cut: the sum of the slices' products."""
    left, right = made.slices(of[0], 1, ends, node), made.slices(of[1], 0, ends, node)
    if left is None or right is None or bias:
        return None
    parts: dict[SliceTurn, NewNode] = {}
    for turn, _ in made.turns(_first_run(made, node, [left, right]), node):
        pair = left.parts[turn.number], right.parts[turn.number]
        parts[turn] = made.of(turn, node, node.target, *pair)
    return _added_up(made, node, parts)


def _added_up(made: Slicing, node: fx.Node, parts: Mapping[SliceTurn, NewNode]) -> NewNode:
    """Return the sum of parts, each added to those of the turns before, in no less than 32 bits."""
    total: NewNode | None = None
    for turn, part in parts.items():
        wide = made.cast(turn, node, part, wide_type(part.value.dtype))
        total = wide if total is None else made.of(turn, node, aten.add.Tensor, total, wide)
    assert total is not None, "there are slices"
    *_, (last, part) = parts.items()
    return made.cast(last, node, total, part.value.dtype)


def _bias(
    made: Slicing, node: fx.Node, bias: Sequence[fx.Node], dim: int, ends: Ends
) -> Callable[[SliceTurn], list[NewNode]]:
    """Return a function that gives the bias of one slice of a product cut along `dim`."""
    if not bias:
        return lambda turn: []
    (source,) = bias
    at = _dim_before(source, dim, shape_of(node))
    sliced = None if at is None else made.slices(source, at, ends, node)
    if sliced is not None:
        return lambda turn: [sliced.parts[turn.number]]
    whole, ranges = made.whole(source, node), list(pairwise((0, *ends)))
    if at is None:
        return lambda turn: [whole]
    take = aten.slice.Tensor
    return lambda turn: [made.of(turn, node, take, whole, at, *ranges[turn.number])]


def _of_state(made: Slicing, node: fx.Node, sliced: Sliced) -> Sliced:
    """Return the result of an op that reads one parameter and nothing else, slice by slice."""
    (source,) = node.all_input_nodes
    rows = sorted(made.turns(sliced, node), key=lambda row: row[0].number)
    given = ((turn, arguments(node, {source: part})) for turn, part in rows)
    parts = tuple(made.of_state(turn, node, *both) for turn, both in given)
    return Sliced(sliced.dim, sliced.ends, parts, of_state=True)


def _cut_of(made: Slicing, node: fx.Node) -> tuple[int, Ends] | None:
    """Return along which dim an elementwise op is cut, and where."""
    if node in made.wanted:
        return made.wanted[node]
    count = len(shape_of(node))
    for source in node.all_input_nodes:
        state = made.states[source]
        if isinstance(state, Sliced | LogSoftmax):
            sliced = made.in_slices(state)
            return sliced.dim + count - len(shape_of(source)), sliced.ends
    return None


def _first_run(made: Slicing, node: fx.Node, many: Sequence[Sliced]) -> Sliced:
    """Return that of several sliced values whose run of this phase began first."""
    cut = [each for each in many if not each.of_state] or many
    own = [
        (each.run[1], k)
        for k, each in enumerate(cut)
        if each.run and each.run[0] == made.rows[node].phase
    ]
    return cut[min(own)[1]] if own else cut[0]


# -- gradients that are wanted in slices ----------------------------------------------------------


def wanted_of(capture: Capture, ends: Mapping[str, Ends]) -> dict[fx.Node, tuple[int, Ends]]:
    """Return the nodes that lead to nothing but gradients of slices: along which dim, where."""
    found: dict[fx.Node, tuple[int, Ends]] = {}
    for name, row in ends.items():
        place = capture.graph.gradients.get(name)
        stack = [] if place is None else [(capture.fx_nodes[place], 0)]
        while stack:
            node, dim = stack.pop()
            if _can_be_cut(node):
                found[node] = dim, row
                stack += _behind(node, dim)
    return found


def _can_be_cut(node: fx.Node) -> bool:
    products = *PRODUCTS, aten.embedding_dense_backward.default
    return node.target in (*products, *VIEWS, *SUMS) or is_elementwise(node.target)


def _behind(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """Return the inputs that only this value reads, and the dim of each that is its dim `dim`.

    The operands of a product, or what others read too, are taken in parts there.
    """
    found: list[tuple[fx.Node, int]] = []
    if node.target in (*PRODUCTS, aten.embedding_dense_backward.default):
        return found
    for source in node.all_input_nodes:
        if source.op != "call_function" or (len(source.users) > 1 and source.target not in VIEWS):
            continue
        old = shape_of(source)
        if node.target in SUMS:
            count, over, keeps = summed_dims(node)
            left = [d for d in range(count) if keeps or d not in over]
            back = None if left[dim] in over else left[dim]
        elif node.target in VIEWS:
            rows = (d for d in range(len(old)) if view_dim(node, old, d, shape_of(node)) == dim)
            back = next(rows, None)
        else:
            back = _dim_before(source, dim, shape_of(node))
        found += [] if back is None else [(source, back)]
    return found


# -- dims -----------------------------------------------------------------------------------------


def _dim_before(source: fx.Node, dim: int, shape: tuple[int, ...]) -> int | None:
    """Return the dim of an operand that is dim `dim` of an elementwise op's result.

    None where it has none, or repeats one number along it.
    """
    own = shape_of(source)
    at = dim - (len(shape) - len(own))
    return at if at >= 0 and own[at] == shape[dim] > 1 else None


def _view_args(node: fx.Node, dim: int, part: Tensor, of: int) -> tuple[Any, ...]:
    """Return the further arguments of a view, for a part of its input.

    dim:  of the view that is cut; of: that of what it looks at.
    """
    more: Any = node.args[1:]
    if node.target not in SIZED:
        return tuple(more)
    sizes = list(more[0])
    sizes[dim] = part.shape[of]
    return (sizes, *more[1:])
