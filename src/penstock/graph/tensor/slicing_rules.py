"""Rules: what an op can make of values that ranks have in slices, or as summands.

A rule yields choices for an op, given where its inputs are; every op can also take all of its
inputs whole, and make a whole value on every rank.  What has no rule here does just that.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from penstock.graph import by_rows
from penstock.graph.dims import (
    SIZED,
    aten,
    is_elementwise,
    shape_of,
    summed_dims,
    view_dim,
)
from penstock.graph.joined.along import argument, dims_of
from penstock.graph.tensor import class_slices, drawn_slices, expert_rows, expert_slices
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.op_choice import (
    OpChoice,
    OpSeries,
    OpWriter,
    Rule,
    States,
    all_whole,
    given,
    single,
)
from penstock.graph.tensor.value_placement import (
    PARTIAL,
    WHOLE,
    Filled,
    Partial,
    Placement,
    Slices,
    State,
    fits,
    reshaped,
)


def count_of(node: fx.Node) -> int:
    """Return the number of an op's results; 0: it is one value."""
    value: Any = node.meta.get("val")
    return len(value) if isinstance(value, tuple | list) else 0  # pyright: ignore[reportUnknownArgumentType]


def choices(node: fx.Node, states: States, ranks: int) -> list[OpChoice]:
    """Return the ways to compute an op that divide its work among ranks, or put off a sum."""
    is_whole = all(states[source] == WHOLE for source in node.all_input_nodes)
    if is_whole and node.target not in _OF_TABLES:
        return []
    rule = RULES.get(node.target) or (_elementwise if is_elementwise(node.target) else None)
    if rule is None:
        return []
    return [each for each in rule(node, states, ranks) if _possible(node, each, ranks)]


_OF_TABLES = (  # whose table, or its gradient, may be sliced though what they read is whole
    aten.embedding_dense_backward.default,
    aten.index.Tensor,
    aten.index_put.default,
)


def _possible(node: fx.Node, choice: OpChoice, ranks: int) -> bool:
    for source, place in choice.wants.items():
        if not fits(place, shape_of(source), ranks):
            return False
    return isinstance(choice.out, tuple) or fits(choice.out, shape_of(node), ranks)


# -- element by element ---------------------------------------------------------------------------


def _elementwise(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    shape = shape_of(node)
    outs: dict[Slices, None] = {}
    for source in node.all_input_nodes:
        place = single(states, source)
        if isinstance(place, Slices):
            dim = place.dim + len(shape) - len(shape_of(source))
            if dim >= 0 and shape[dim] == shape_of(source)[place.dim]:
                outs[place.along(dim)] = None
    for out in outs:
        yield OpChoice({s: _part_of(s, out, shape) for s in node.all_input_nodes}, out)
    yield from _linear(node, states)
    yield from expert_rows.elementwise(node, states)
    yield from _spread(node, states, ranks)


def _spread(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Yield the choice that makes slices of tokens of the sum of summands."""
    shape = shape_of(node)
    due = any(
        isinstance(single(states, each), Partial) and shape_of(each) == shape
        for each in node.all_input_nodes
    )
    dims = (dim for dim, size in enumerate(shape[:-1]) if size and size % ranks == 0)
    if due and (dim := next(dims, None)) is not None:
        out = Slices(dim)
        wants = {each: _part_of(each, out, shape) for each in node.all_input_nodes}
        yield OpChoice(wants, out, spreads=True)


def _part_of(source: fx.Node, out: Slices, shape: tuple[int, ...]) -> Placement:
    """Return the part of an operand, which is broadcast, that a slice of the result needs."""
    own = shape_of(source)
    dim = out.dim - (len(shape) - len(own))
    return out.along(dim) if dim >= 0 and own[dim] == shape[out.dim] else WHOLE


def _linear(node: fx.Node, states: States) -> Iterator[OpChoice]:
    """Yield the choice that makes a summand of the result of summands."""
    match node.target:
        case aten.add.Tensor | aten.sub.Tensor:
            places = {each: single(states, each) for each in node.all_input_nodes}
            if all(isinstance(single(states, each), Partial) for each in given(node)[:2]):
                alike = len({*places.values()}) == len({*map(shape_of, places)}) == 1
                yield OpChoice(places, next(iter(places.values())) if alike else PARTIAL)
        case aten.neg.default if isinstance(place := single(states, given(node)[0]), Partial):
            yield OpChoice(dict.fromkeys(node.all_input_nodes, place), place)
        case aten.mul.Tensor | aten.div.Tensor if isinstance(
            place := single(states, given(node)[0]), Partial
        ) and not isinstance(given(node)[1], fx.Node):
            yield OpChoice(dict.fromkeys(node.all_input_nodes, place), place)
        case _:
            return


# -- views ----------------------------------------------------------------------------------------


def _viewed(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    source = node.all_input_nodes[0]
    place, old, new = single(states, source), shape_of(source), shape_of(node)
    if len(node.all_input_nodes) > 1:  # a size that a tensor gives
        return
    if isinstance(place, Partial):
        keeps = node.target not in _RESHAPES or old[: place.dim + 1] == new[: place.dim + 1]
        dim = view_dim(node, old, place.dim, new) if keeps else None
        yield OpChoice({source: place}, expert_rows.through(node, place, dim))
    if not isinstance(place, Slices | Filled):
        return
    out: Placement | None
    if node.target in _RESHAPES and isinstance(place, Slices):
        out = reshaped(place, old, new, ranks)
    else:
        dim = view_dim(node, old, place.dim, new)
        out = None if dim is None else place.along(dim)
    if out is not None:
        yield OpChoice({source: place}, out)


_RESHAPES = aten.view.default, aten._unsafe_view.default, aten.reshape.default


def _same_dims(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Copies: the result is placed as the value."""
    source = node.all_input_nodes[0]
    if (place := single(states, source)) != WHOLE:
        yield OpChoice({source: place}, place)


def _squeezed(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    source = node.all_input_nodes[0]
    place, old = single(states, source), shape_of(source)
    if isinstance(place, Slices | Partial):
        over = dims_of(node, len(old)) if len(given(node)) > 1 else range(len(old))
        gone = [d for d in over if old[d] == 1]
        dim = place.dim - sum(d < place.dim for d in gone)
        yield OpChoice({source: place}, PARTIAL if place.dim in gone else place.along(dim))


def _selected(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """One place along a dim, or all of them apart."""
    source = node.all_input_nodes[0]
    place, rank = single(states, source), len(shape_of(source))
    count = count_of(node)
    out: Placement = PARTIAL if isinstance(place, Partial) else place
    if place == WHOLE or isinstance(place, Filled):
        return
    if isinstance(place, Slices):
        (over,) = dims_of(node, rank) if len(given(node)) > 1 else [0]
        if over == place.dim:
            return
        out = place.along(place.dim - (over < place.dim))
    yield OpChoice({source: place}, (out,) * count if count else out)


def _put_back(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of one place along a dim: zeros elsewhere."""
    source = node.all_input_nodes[0]
    place, new = single(states, source), shape_of(node)
    at: Any = given(node)[2]
    if isinstance(place, Partial):
        yield OpChoice({source: place}, PARTIAL)
    if isinstance(place, Slices):
        dim = place.dim + (at % len(new) <= place.dim)
        yield OpChoice({source: place}, place.along(dim))


def _split(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Pieces along a dim: of one that is sliced, where each piece is as many whole runs."""
    source = node.all_input_nodes[0]
    place, values = single(states, source), node.meta["val"]
    if place == WHOLE:
        return
    out: State = (place,) * len(values)
    at: Any = argument(node, "dim")
    rank = len(shape_of(source))
    if isinstance(place, Filled) and at % rank == place.dim:
        return
    if isinstance(place, Partial) and at % rank == place.dim:
        out = (PARTIAL,) * len(values)
    if isinstance(place, Slices) and at % rank == place.dim:
        sizes = {value.shape[place.dim] for value in values}
        runs, rest = divmod(place.pieces, len(values))
        if len(sizes) > 1 or rest or (place.folded and runs % 2):
            return
        out = (replace(place, pieces=runs),) * len(values)
    yield OpChoice({source: place}, out)


def _beside(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Values one behind the other along a dim."""
    places = [single(states, source) for source in node.all_input_nodes]
    rank = len(shape_of(node))
    at: Any = argument(node, "dim")
    if all(isinstance(place, Partial) for place in places):
        (first, *others) = places
        assert isinstance(first, Partial), "all are"
        along = node.target is aten.stack.default or at % rank == first.dim
        out = PARTIAL if along or any(place != first for place in others) else first
        yield OpChoice(dict(zip(node.all_input_nodes, places, strict=True)), out)
        return
    own = {place for place in places if isinstance(place, Slices)}
    if len({len(shape_of(source)) for source in node.all_input_nodes}) > 1:
        return  # an empty one of no dims stands beside others
    for place in own:
        stacks = node.target is aten.stack.default
        dim = place.dim + (stacks and at % rank <= place.dim)
        if stacks or at % rank != place.dim:
            wants = dict.fromkeys(node.all_input_nodes, place)
            yield OpChoice(wants, place.along(dim))
        elif len({shape_of(s)[dim] for s in node.all_input_nodes}) == 1:
            values: Any = given(node)[0]
            wants = dict.fromkeys(node.all_input_nodes, place)
            yield OpChoice(wants, replace(place, pieces=place.pieces * len(values)))


# -- along other dims -----------------------------------------------------------------------------


def _kept(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """An op that keeps all dims, and does not work along the sliced one."""
    shape = shape_of(node.all_input_nodes[0])
    over = dims_of(node, len(shape))
    for source in node.all_input_nodes:
        place = single(states, source)
        if isinstance(place, Slices) and place.dim not in over:
            if all(shape_of(each) == shape for each in node.all_input_nodes):
                yield OpChoice(dict.fromkeys(node.all_input_nodes, place), place)
            return


def _log_softmax(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    yield from _kept(node, states, ranks)
    yield from class_slices.log_softmax(node, states, ranks)


def _log_softmax_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    yield from _kept(node, states, ranks)
    yield from class_slices.log_softmax_backward(node, states, ranks)


def _summed(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    source = node.all_input_nodes[0]
    place = single(states, source)
    _, over, keeps = summed_dims(node)
    if isinstance(place, Slices | Partial):
        if place.dim in over:
            yield OpChoice({source: place}, PARTIAL)
        else:
            dim = place.dim if keeps else place.dim - sum(d < place.dim for d in over)
            yield OpChoice({source: place}, place.along(dim))


def _reduced(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """A mean, a greatest, a variance: not over the sliced dim."""
    source = node.all_input_nodes[0]
    place, shape = single(states, source), shape_of(source)
    if not isinstance(place, Slices):
        return
    over = dims_of(node, len(shape))
    if place.dim in over:
        return
    keeps = bool(argument(node, "keepdim"))
    dim = place.dim if keeps else place.dim - sum(d < place.dim for d in over)
    out, count = place.along(dim), count_of(node)
    yield OpChoice({source: place}, (out,) * count if count else out)


def _normed(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Layer norm of rows of which each rank has some."""
    x, sizes, *_ = given(node)
    place = single(states, x)
    rows = len(shape_of(x)) - len(sizes)
    if isinstance(place, Slices) and place.dim < rows:
        wants = {**all_whole(node), x: place}
        yield OpChoice(wants, (place,) * 3)


def _normed_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    gradient, x, sizes, mean, rstd, *_ = given(node)
    rows = len(shape_of(x)) - len(sizes)
    for each in (gradient, x):
        place = single(states, each)
        if isinstance(place, Slices) and place.dim < rows:
            own = dict.fromkeys((gradient, x, mean, rstd), place)
            yield OpChoice({**all_whole(node), **own}, (place, PARTIAL, PARTIAL))
            return


# -- products -------------------------------------------------------------------------------------


def _product(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    *bias, left, right = given(node)
    one, other = single(states, left), single(states, right)
    extra = bias[0] if bias else None
    own = len(shape_of(extra)) if isinstance(extra, fx.Node) else 0

    def wants(a: Placement, b: Placement, c: Placement) -> Mapping[Any, Placement]:
        return {left: a, right: b, **({extra: c} if own else {})}

    if isinstance(one, Slices) and one.dim == 0:
        yield OpChoice(wants(one, WHOLE, one if own == 2 else WHOLE), one)
    if isinstance(other, Slices) and other.dim == 1:
        yield OpChoice(wants(WHOLE, other, other.along(own - 1)), other)
    inner = (one,) if isinstance(one, Slices) and one.dim == 1 else ()
    if isinstance(other, Slices) and other.dim == 0:
        inner = (*inner, other.along(1))
    for place in dict.fromkeys(inner):
        made = wants(place, place.along(0), WHOLE)
        scaled = bool(node.kwargs)
        if not (bias and (scaled or not own)):
            yield _bias_last(node, extra, made) if bias else OpChoice(made, PARTIAL)
            if bias and (tokens := _tokens_of(node, ranks)) is not None:
                yield _bias_last(node, extra, made, tokens)


def _tokens_of(node: fx.Node, ranks: int) -> Slices | None:
    """Return slices of the rows of a product that its views have, too; None: there are none."""
    (rows, _) = shape_of(node)
    firsts = [shape_of(each)[0] for each in node.users if each.target in _RESHAPES]
    pieces = 1 if not firsts or firsts[0] % ranks == 0 else firsts[0]
    return None if rows % (pieces * ranks) else Slices(0, pieces)


def _bias_last(
    node: fx.Node, bias: Any, wants: Mapping[Any, Placement], tokens: Slices | None = None
) -> OpChoice:
    """Return the choice of a product or a convolution without its bias, summed, the bias added.

    tokens:   the slices of rows that ranks keep of the sum; None: all keep all.
    """
    is_product = node.target is aten.addmm.default
    rest = node.args[1:] if is_product else (*node.args[:2], None, *node.args[3:])

    def build(write: OpWriter, own: Mapping[fx.Node, fx.Node]) -> tuple[Any]:
        target: Any = aten.mm.default if is_product else node.target
        part = write.new(target, *map_arg(rest, own.__getitem__))
        if tokens is not None:
            return (write.new(aten.add.Tensor, write.scattered(part, tokens), own[bias]),)
        total, added = write.new(COLLECT, part, "sum", write.ranks), own[bias]
        if not is_product:
            ones = [1] * (node.meta["val"].dim() - 2)
            added = write.new(aten.view.default, added, [-1, *ones])
        return (write.new(aten.add.Tensor, total, added),)

    value = node.meta["val"]
    size_bytes = float(value.numel() * value.itemsize)
    if tokens is not None:
        return OpChoice(wants, tokens, OpSeries(build, scattered_bytes=size_bytes), spreads=True)
    return OpChoice(wants, WHOLE, OpSeries(build, summed_bytes=size_bytes))


def _products(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Products of several pairs of matrices."""
    left, right = given(node)
    pairs: list[tuple[Any, Any, Any]] = []
    for place in (single(states, left), single(states, right)):
        if isinstance(place, Slices) and place.dim == 0:
            pairs.append((place, place, place))
    one, other = single(states, left), single(states, right)
    if isinstance(one, Slices) and one.dim == 1:
        pairs.append((one, WHOLE, one))
    if isinstance(other, Slices) and other.dim == 2:
        pairs.append((WHOLE, other, other))
    if isinstance(one, Slices) and one.dim == 2:
        pairs.append((one, one.along(1), PARTIAL))
    elif isinstance(other, Slices) and other.dim == 1:
        pairs.append((other.along(2), other, PARTIAL))
    for a, b, out in dict.fromkeys(pairs):
        if left is not right or a == b:
            yield OpChoice({left: a, right: b}, out)


def _embedded(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    weight, index = given(node)[:2]
    place, rank = single(states, weight), len(shape_of(node))
    yield from class_slices.embedding(node, states, ranks)
    if isinstance(place, Slices) and place.dim == 1:
        yield OpChoice({weight: place, index: WHOLE}, place.along(rank - 1))
    at = single(states, index)
    if isinstance(at, Slices):
        yield OpChoice({weight: WHOLE, index: at}, at)


def _embedded_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    gradient, index = given(node)[:2]
    place, rank = single(states, gradient), len(shape_of(gradient))
    yield from class_slices.embedding_backward(node, states, ranks)
    if not isinstance(place, Slices) or (len(given(node)) > 4 and given(node)[4]):
        return
    if place.dim == rank - 1:
        yield OpChoice({gradient: place, index: WHOLE}, place.along(1))
    else:
        yield OpChoice({gradient: place, index: place}, PARTIAL)


def _convolution(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    x, weight, bias, *_ = given(node)
    transposed, groups = given(node)[6], given(node)[8]
    one, other = single(states, x), single(states, weight)
    own: Mapping[Any, Placement] = {bias: WHOLE} if isinstance(bias, fx.Node) else {}
    if isinstance(one, Slices) and one.dim == 0:
        yield OpChoice({x: one, weight: WHOLE, **own}, one)
    if transposed or groups != 1:
        return
    if isinstance(other, Slices) and other.dim == 0:
        column = dict.fromkeys(own, other.along(0))
        yield OpChoice({x: WHOLE, weight: other, **column}, other.along(1))
    for place in dict.fromkeys((one, other)):
        if isinstance(place, Slices) and place.dim == 1:
            wants = {x: place, weight: place, **own}
            yield _bias_last(node, bias, wants) if own else OpChoice(wants, PARTIAL)


def _convolution_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    gradient, x, weight = given(node)[:3]
    transposed, groups = given(node)[7], given(node)[9]
    grad, one, other = (single(states, each) for each in (gradient, x, weight))
    rows = next((p for p in (grad, one) if isinstance(p, Slices) and p.dim == 0), None)
    if rows is not None:
        wants = {gradient: rows, x: rows, weight: WHOLE}
        yield OpChoice(wants, (rows, PARTIAL, PARTIAL))
    if transposed or groups != 1:
        return
    if isinstance(other, Slices) and other.dim == 0:
        wants = {gradient: other.along(1), x: WHOLE, weight: other}
        yield OpChoice(wants, (PARTIAL, other, other))
    if isinstance(other, Slices) and other.dim == 1:
        yield OpChoice({gradient: WHOLE, x: other, weight: other}, (other, other, WHOLE))


def _pooled(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Pooling: image by image and channel by channel."""
    count = count_of(node)
    rank = len(shape_of(node.all_input_nodes[0]))
    for source in node.all_input_nodes:
        place = single(states, source)
        if isinstance(place, Slices) and place.dim < rank - 2:
            out: State = (place,) * count if count else place
            yield OpChoice(dict.fromkeys(node.all_input_nodes, place), out)
            return


# -- attention ------------------------------------------------------------------------------------


def _attended(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Attention, [B, H, T, d], by samples or heads."""
    query, key, value = given(node)[:3]
    if argument(node, "dropout_p"):
        return
    place = _heads(states, (query, key, value))
    if place is None:
        return
    mask: Any = argument(node, "attn_mask")
    wants = {**dict.fromkeys((query, key, value), place), **_of_mask(mask, place)}
    yield OpChoice(wants, (place,) * count_of(node))


def _attended_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    if argument(node, "dropout_p"):
        return
    own = [each for each in given(node)[:6] if isinstance(each, fx.Node)]
    place = _heads(states, own)
    if place is not None:
        mask: Any = argument(node, "attn_mask")
        yield OpChoice({**dict.fromkeys(own, place), **_of_mask(mask, place)}, (place,) * 3)


def _heads(states: States, nodes: Any) -> Slices | None:
    places = [single(states, each) for each in nodes]
    found = (p for p in places if isinstance(p, Slices) and p.dim < 2)
    place = next(found, None)
    sizes = {shape_of(each)[:2] for each in nodes}
    grouped = place == Slices(1) and len({size[0] for size in sizes}) == 1
    return place if len(sizes) == 1 or grouped else None


def _of_mask(mask: Any, place: Slices) -> dict[fx.Node, Placement]:
    if not isinstance(mask, fx.Node):
        return {}
    shape = shape_of(mask)
    dim = place.dim - (4 - len(shape))
    return {mask: place.along(dim) if dim >= 0 and shape[dim] > 1 else WHOLE}


RESHAPED = (
    *_RESHAPES,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.clone.default,
    aten.alias.default,
)


def _table(rule: Rule, *targets: Any) -> dict[Any, Rule]:
    return dict.fromkeys(targets, rule)


RULES: dict[Any, Rule] = {
    **_table(
        _viewed,
        *SIZED,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.slice.Tensor,
        aten.unsqueeze.default,
    ),
    **_table(_same_dims, aten.clone.default, aten.alias.default, aten.detach.default),
    **_table(drawn_slices.drawn, *drawn_slices.OF_A_SHAPE),
    **_table(drawn_slices.dropped, aten.native_dropout.default),
    **_table(_squeezed, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
    **_table(_selected, aten.select.int, aten.unbind.int),
    **_table(_put_back, aten.select_backward.default),
    **_table(
        _split,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    ),
    **_table(_beside, aten.cat.default, aten.stack.default),
    **_table(
        _kept,
        aten._softmax.default,
        aten._safe_softmax.default,
        aten._softmax_backward_data.default,
        aten.cumsum.default,
        aten.flip.default,
    ),
    **_table(_log_softmax, aten._log_softmax.default),
    **_table(_log_softmax_backward, aten._log_softmax_backward_data.default),
    **_table(class_slices.loss, aten.nll_loss_forward.default),
    **_table(class_slices.loss_backward, aten.nll_loss_backward.default),
    **_table(class_slices.joined_backward, by_rows.LOSS_BACKWARD),
    **_table(_summed, aten.sum.dim_IntList, aten.sum.default),
    **_table(
        _reduced,
        aten.mean.dim,
        aten.amax.default,
        aten.amin.default,
        aten.var.correction,
        aten.var_mean.correction,
        aten.linalg_vector_norm.default,
    ),
    **_table(_normed, aten.native_layer_norm.default),
    **_table(_normed_backward, aten.native_layer_norm_backward.default),
    **_table(_product, aten.mm.default, aten.addmm.default),
    **_table(_products, aten.bmm.default),
    **_table(expert_slices.grouped, expert_slices.GROUPED),
    **_table(expert_rows.indexed, *expert_rows.PICKS),
    **_table(expert_rows.put_into_zeros, *expert_rows.PUTS),
    **_table(expert_rows.of_its_own, *expert_rows.MAKERS),
    **_table(_embedded, aten.embedding.default),
    **_table(_embedded_backward, aten.embedding_dense_backward.default),
    **_table(_convolution, aten.convolution.default),
    **_table(_convolution_backward, aten.convolution_backward.default),
    **_table(
        _pooled,
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.avg_pool2d.default,
        aten.avg_pool2d_backward.default,
        aten._adaptive_avg_pool2d.default,
        aten._adaptive_avg_pool2d_backward.default,
    ),
    **_table(_attended, aten._scaled_dot_product_flash_attention_for_cpu.default),
    **_table(_attended_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward.default),
}


def local_args(node: fx.Node, out: tuple[int, ...], ranks: int, wants: Any) -> tuple[Any, ...]:
    """Return the arguments of an op, its sizes those of what one rank computes.

    out:  the shape of its result on one rank; of several, of the first.
    """
    args: list[Any] = list(given(node))
    match node.target:
        case aten.select_backward.default | aten.slice_backward.default:
            args[1] = list(out)
        case target if target in SIZED:
            args[1] = list(out)
        case aten.convolution_backward.default:
            gradient = wants[args[0]]
            if args[3] is not None and gradient == Slices(1, getattr(gradient, "pieces", 1)):
                args[3] = [size // ranks for size in args[3]]
        case aten.split.Tensor | aten.unsafe_split.Tensor if isinstance(
            place := wants[args[0]], Slices
        ):
            at: Any = argument(node, "dim")
            if at % len(shape_of(args[0])) == place.dim:
                args[1] = args[1] // ranks
        case aten.split_with_sizes.default | aten.unsafe_split_with_sizes.default if isinstance(
            place := wants[args[0]], Slices
        ):
            at = argument(node, "dim")
            if at % len(shape_of(args[0])) == place.dim:
                args[1] = [size // ranks for size in args[1]]
        case _:
            pass
    return tuple(args)


def work_of(node: fx.Node) -> int:
    """Return the numbers that an op reads and writes."""
    values: list[Any] = [source.meta.get("val") for source in node.all_input_nodes]
    made: Any = node.meta.get("val")
    values += [*made] if count_of(node) else [made]
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return sum(prod(value.shape) for value in tensors)
