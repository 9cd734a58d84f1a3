"""Along: ops that work along some dims, one place of all others after the other.

Where the samples are along another dim, the op is of all micro-batches at once.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from penstock import _compat
from penstock.graph.dims import aten, shape_of
from penstock.graph.joined.joiner import Abreast, Joiner, Rule, Same, State, is_tensor, replaced


def argument(node: fx.Node, *names: str) -> Any:
    """Return the argument of one of these names, or its default."""
    schema = _compat.schema_of(node.target)
    for at, each in enumerate(schema.arguments):
        if each.name in names:
            given = node.kwargs.get(each.name, each.default_value)
            return node.args[at] if at < len(node.args) else given
    return None


def dims_of(node: fx.Node, rank: int) -> list[int]:
    """Return the dims along which an op works; all of them where it does not say."""
    given = argument(node, "dim", "dims", "dimension")
    if isinstance(given, int):
        return [given % rank]
    return [d % rank for d in given] if given else list(range(rank))


def _samples(made: Joiner, node: fx.Node) -> int | None:
    dims = (made.dim_of(source) for source in node.all_input_nodes)
    return next((dim for dim in dims if dim is not None), None)


def _all_beside(made: Joiner, node: fx.Node, dim: int) -> dict[fx.Node, fx.Node] | None:
    """Return the inputs of an op, all side by side along `dim`; None: their sizes differ."""
    found: dict[fx.Node, fx.Node] = {}
    rank = len(shape_of(node.all_input_nodes[0]))
    sizes = {shape_of(source)[dim : dim + 1] for source in node.all_input_nodes}
    if len(sizes) > 1 or any(len(shape_of(source)) != rank for source in node.all_input_nodes):
        return None
    for source in node.all_input_nodes:
        one = made.beside(source, dim, node, made.outer_of(node.all_input_nodes))
        if one is None:
            return None
        found[source] = one
    return found


def _results(made: Joiner, node: fx.Node, dim: int, args: Any, kwargs: Any) -> State | None:
    outer = made.outer_of(node.all_input_nodes)
    if is_tensor(node):
        return made.beside_op(node, (dim, outer), args, kwargs)
    return made.several(node, [dim] * len(node.meta["val"]), args, kwargs, outer)


def kept(made: Joiner, node: fx.Node) -> State | None:
    """Return the result of an op that keeps all dims and does not work along the samples."""
    dim = _samples(made, node)
    if dim is None or dim in dims_of(node, len(shape_of(node.all_input_nodes[0]))):
        return None
    given = _all_beside(made, node, dim)
    return None if given is None else _results(made, node, dim, *replaced(node, given))


def reduced(made: Joiner, node: fx.Node) -> State | None:
    """Return the result of an op that drops the dims along which it works."""
    (source,) = node.all_input_nodes
    state, over = made.states[source], dims_of(node, len(shape_of(source)))
    if not isinstance(state, Abreast) or state.dim in over:
        return None
    keeps = bool(argument(node, "keepdim"))
    dim = state.dim if keeps else state.dim - sum(d < state.dim for d in over)
    return _results(made, node, dim, *replaced(node, {source: state.node}))


def selected(made: Joiner, node: fx.Node) -> State | None:
    """Return the gradient of a part, in zeros of the shape of the whole."""
    sizes, at, *more = node.args[1:]
    state, rank = made.states[node.all_input_nodes[0]], len(shape_of(node))
    if not isinstance(state, Abreast) or not isinstance(at, int):
        return None
    dim = state.dim + (at % rank <= state.dim)
    place = dim, state.outer
    return made.beside_op(node, place, (state.node, made.wide(sizes, dim), at, *more))  # pyright: ignore


def put_in(made: Joiner, node: fx.Node) -> State | None:
    """Return a value with one place along a dim replaced, a dim other than the samples'."""
    whole, one, *more = node.args
    at, rank = more[0], len(shape_of(node))
    dims = made.dim_of(whole), made.dim_of(one)
    dim = dims[0] if dims[0] is not None else dims[1]
    if dim is None or not isinstance(at, int) or not isinstance(whole, fx.Node):
        return None
    dim += dims[0] is None and at % rank <= dim
    if dim == at % rank or not isinstance(one, fx.Node):
        return None
    outer = made.outer_of((whole, one))
    first = made.beside(whole, dim, node, outer)
    second = made.beside(one, dim - (at % rank < dim), node, outer)
    if first is None or second is None:
        return None
    return made.beside_op(node, (dim, outer), (first, second, *more))


def squeezed(made: Joiner, node: fx.Node) -> State | None:
    """Return a value without dims of one; not that of the samples."""
    (source,) = node.all_input_nodes
    state, shape = made.states[source], shape_of(source)
    if not isinstance(state, Abreast):
        return None
    over = dims_of(node, len(shape)) if len(node.args) > 1 else list(range(len(shape)))
    gone = [d for d in over if shape[d] == 1]
    if state.dim in gone:
        return None
    dim = state.dim - sum(d < state.dim for d in gone)
    return made.beside_op(node, (dim, state.outer), (state.node, *node.args[1:]))


def stacked(made: Joiner, node: fx.Node) -> State | None:
    """Return values one behind the other along a dim that they have not."""
    dim = _samples(made, node)
    given = None if dim is None else _all_beside(made, node, dim)
    if dim is None or given is None:
        return None
    (at,) = dims_of(node, len(shape_of(node)))
    return _results(made, node, dim + (at <= dim), *replaced(node, given))


def picked(made: Joiner, node: fx.Node) -> State | None:
    """Return rows, or columns, that are the same for every sample."""
    source, index = node.args[0], node.args[2]
    state = made.states[node.all_input_nodes[0]]
    rank = len(shape_of(node))
    if (
        not isinstance(state, Abreast)
        or not made.is_same(index)
        or state.dim in dims_of(node, rank)
    ):
        return None
    given = {source: state.node, index: made.same(index)}  # pyright: ignore
    return made.beside_op(node, (state.dim, state.outer), *replaced(node, given))  # pyright: ignore


def in_last(count: int) -> Rule:
    """Return the rule of an op of one value that works along its last `count` dims."""

    def rule(made: Joiner, node: fx.Node) -> State | None:
        (source,) = node.all_input_nodes
        state = made.states[source]
        if not isinstance(state, Abreast) or state.dim >= len(shape_of(source)) - count:
            return None
        return made.beside_op(node, (state.dim, state.outer), *replaced(node, {source: state.node}))

    return rule


def padded(made: Joiner, node: fx.Node) -> State | None:
    """Return a padded value; the samples' dim has no padding."""
    pad: Any = node.args[1]
    return in_last(len(pad) // 2)(made, node)


def new(made: Joiner, node: fx.Node) -> State | None:
    """Return a new tensor whose source gives it dtype and device only."""
    (source,) = node.all_input_nodes
    return Same(made.copied(node, lambda _: made.any_of(source, node)))


def embedded(made: Joiner, node: fx.Node) -> State | None:
    """Return the rows of a table at indices of the batch."""
    weight, index, *more = node.args
    state = made.states[index]  # pyright: ignore[reportArgumentType]
    if not isinstance(state, Abreast) or not made.is_same(weight):
        return None
    args = (made.same(weight), state.node, *more)  # pyright: ignore[reportArgumentType]
    return made.beside_op(node, (state.dim, state.outer), args)


def indexed(made: Joiner, node: fx.Node) -> State | None:
    """Return places of a table at one index of the batch, or the same places of every sample."""
    source, indices = node.args
    given: list[Any] = [each for each in indices if each is not None]  # pyright: ignore
    if len(given) != 1 or given[0].meta["val"].dtype.is_floating_point:
        return None
    (index,), at = given, [each is not None for each in indices].index(True)  # pyright: ignore
    if index.meta["val"].dtype.itemsize == 1:  # a mask: how many it picks is not known
        return None
    return _at_index(made, node, source, index, at)  # pyright: ignore[reportArgumentType]


def _at_index(
    made: Joiner, node: fx.Node, source: fx.Node, index: fx.Node, at: int
) -> State | None:
    state, places = made.states[source], made.states[index]
    if isinstance(state, Same) and isinstance(places, Abreast):
        pair, dim = {source: state.node, index: places.node}, at + places.dim
    elif isinstance(state, Abreast) and isinstance(places, Same) and state.dim != at:
        more = len(shape_of(index)) - 1 if state.dim > at else 0
        pair, dim = {source: state.node, index: places.node}, state.dim + more
    else:
        return None
    outer = made.outer_of((source, index))
    return made.beside_op(node, (dim, outer), *replaced(node, pair))


def _table(rule: Rule, targets: Sequence[Any]) -> dict[Any, Rule]:
    return dict.fromkeys(targets, rule)


RULES: dict[Any, Rule] = {
    **_table(
        kept,
        (
            aten._softmax.default,
            aten._safe_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax.default,
            aten._log_softmax_backward_data.default,
            aten.cat.default,
            aten.cumsum.default,
            aten.cumprod.default,
            aten.logcumsumexp.default,
            aten.flip.default,
            aten.roll.default,
            aten.sort.default,
            aten.sort.stable,
            aten.topk.default,
            aten.gather.default,
            aten.scatter.src,
            aten.scatter.value,
            aten.scatter_add.default,
            aten.glu.default,
            aten.glu_backward.default,
            aten.split.Tensor,
            aten.unsafe_split.Tensor,
            aten.unsafe_split_with_sizes.default,
            aten.split_with_sizes.default,
            aten.slice_scatter.default,
            aten.unfold.default,
        ),
    ),
    **_table(
        reduced,
        (
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.any.dim,
            aten.any.dims,
            aten.all.dim,
            aten.all.dims,
            aten.argmax.default,
            aten.argmin.default,
            aten.max.dim,
            aten.min.dim,
            aten.prod.dim_int,
            aten.var.correction,
            aten.std.correction,
            aten.var_mean.correction,
            aten.std_mean.correction,
            aten.logsumexp.default,
            aten.linalg_vector_norm.default,
            aten.norm.ScalarOpt_dim,
            aten.select.int,
            aten.unbind.int,
        ),
    ),
    **_table(selected, (aten.select_backward.default,)),
    **_table(put_in, (aten.select_scatter.default,)),
    **_table(squeezed, (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)),
    **_table(stacked, (aten.stack.default,)),
    **_table(picked, (aten.index_select.default,)),
    **_table(in_last(2), (aten.tril.default, aten.triu.default)),
    **_table(in_last(1), (aten.view_as_real.default, aten.view_as_complex.default)),
    **_table(padded, (aten.constant_pad_nd.default,)),
    **_table(
        new,
        (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_full.default,
            aten.new_empty.default,
            aten.new_empty_strided.default,
        ),
    ),
    **_table(embedded, (aten.embedding.default,)),
    **_table(indexed, (aten.index.Tensor, aten._unsafe_index.Tensor)),
}
