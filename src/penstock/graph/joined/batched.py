"""Batched: ops of samples, one after the other along the first dim; and what sums them up.

convolutions, pooling, resizing    samples along the first dim
norms over the last dims           along any dim before these
attention                          along the first dim
gradients of weights               summed over samples
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import fx

from penstock.graph.dims import aten, shape_of
from penstock.graph.joined.joiner import SUMMED, Joiner, Place, Rule, Sealed, State, is_tensor


class _Batched(NamedTuple):
    """How an op takes samples.

    of:       which arguments hold them; the others are the same for every micro-batch.
    results:  where they are in each result.
    counts:   which argument is how many they are.
    sizes:    which argument is the shape of a result.
    rank:     dims that the first argument has to have.
    """

    of: tuple[int, ...]
    results: tuple[Place, ...] = (0,)
    counts: int | None = None
    sizes: int | None = None
    rank: int | None = None

    def __call__(self, made: Joiner, node: fx.Node) -> State | None:
        """Return the result of the op on all micro-batches; None: it may couple samples."""
        summed = [number for number, place in enumerate(self.results) if place == SUMMED]
        if summed and not made.is_summed(node, summed):
            return None
        args, first = list(node.args), node.args[self.of[0]]
        if self.rank is not None and len(shape_of(first)) != self.rank:  # pyright: ignore
            return None
        for at, given in enumerate(args):
            if isinstance(given, fx.Node):
                args[at] = _taken(made, node, given, 0 if at in self.of else None)
                if args[at] is None:
                    return None
        self._widen(made, args)
        kwargs = dict(node.kwargs)
        if any(isinstance(given, fx.Node) for given in kwargs.values()):
            return None
        return _results(made, node, self.results, args, kwargs)

    def _widen(self, made: Joiner, args: list[Any]) -> None:
        if self.counts is not None:
            args[self.counts] = made.sized(args[self.counts])
        if self.sizes is not None:
            args[self.sizes] = made.wide(args[self.sizes], 0)


def _taken(
    made: Joiner, node: fx.Node, given: fx.Node, dim: int | None, outer: int = 1
) -> fx.Node | None:
    """Return an argument beside one another along `dim`; None: the same for every micro-batch."""
    state = made.states[given]
    if isinstance(state, Sealed):
        return state.node
    if dim is not None:
        return made.beside(given, dim, node, outer)
    return made.same(given) if made.is_same(given) else None


def _results(
    made: Joiner, node: fx.Node, places: Sequence[Place], args: Sequence[Any], kwargs: Any
) -> State | None:
    if not is_tensor(node):
        return made.several(node, places, tuple(args), kwargs)
    (place,) = places
    return made.beside_op(node, (place, 1), tuple(args), kwargs) if isinstance(place, int) else None


def layer_norm(of: tuple[int, ...], sizes: int, results: tuple[Place, ...]) -> Rule:
    """Return the rule of a norm over the last dims.

    of:       which arguments hold samples; `sizes`: which one is the shape of the last dims.
    results:  where samples are in each: 0 for where they were.
    """

    def rule(made: Joiner, node: fx.Node) -> State | None:
        summed = [number for number, place in enumerate(results) if place == SUMMED]
        args: list[Any] = list(node.args)
        dims = [dim for at in of if (dim := made.dim_of(args[at])) is not None]
        dim = dims[0] if dims else 0
        if dim >= len(shape_of(args[of[0]])) - len(args[sizes]):
            return None
        if summed and not made.is_summed(node, summed):
            return None
        outer = made.outer_of(node.all_input_nodes)
        for at, given in enumerate(args):
            if isinstance(given, fx.Node):
                args[at] = _taken(made, node, given, dim if at in of else None, outer)
                if args[at] is None:
                    return None
        places = [dim if place == 0 else place for place in results]
        return made.several(node, places, tuple(args), dict(node.kwargs), outer)

    return rule


def attention(of: int, results: tuple[Place, ...]) -> Rule:
    """Return the rule of an op of fused attention: its first `of` tensors hold samples."""

    def rule(made: Joiner, node: fx.Node) -> State | None:
        args: list[Any] = list(node.args)
        for at, given in enumerate(args):
            if isinstance(given, fx.Node):
                args[at] = _taken(made, node, given, 0 if at < of else None)
                if args[at] is None:
                    return None
        kwargs = dict(node.kwargs)
        mask: Any = kwargs.get("attn_mask")
        if isinstance(mask, fx.Node):
            shape, size = shape_of(mask), shape_of(node.args[0])[0]  # pyright: ignore
            is_by_sample = len(shape) == 4 and shape[0] == size
            kwargs["attn_mask"] = one = _taken(made, node, mask, 0 if is_by_sample else None)
            if one is None:
                return None
        return _results(made, node, results, args, kwargs)

    return rule


def efficient(made: Joiner, node: fx.Node) -> State | None:
    """Return attention with a bias for each sample, and its gradients."""
    is_back = node.target is aten._scaled_dot_product_efficient_attention_backward.default
    of = (0, 1, 2, 3, 4, 5, 6) if is_back else (0, 1, 2, 3)
    results: tuple[Place, ...] = (0, 0, 0, 0) if is_back else (0, 0, None, None)
    return _Batched(of, results)(made, node)


def recurrent(places: tuple[int | None, ...], results: tuple[Place, ...], packed: int) -> Rule:
    """Return the rule of a recurrent layer of oneDNN.

    places:   of each argument: along which dim the samples are; None: they are not there.
    packed:   which argument says how many samples there are at each step, if not all.
    """

    def rule(made: Joiner, node: fx.Node) -> State | None:
        args: list[Any] = list(node.args)
        summed = [number for number, place in enumerate(results) if place == SUMMED]
        if args[packed] or not made.is_summed(node, summed):
            return None
        for at, given in enumerate(args):
            if isinstance(given, fx.Node):
                args[at] = _taken(made, node, given, places[at] if at < len(places) else None)
                if args[at] is None:
                    return None
        return made.several(node, results, tuple(args), dict(node.kwargs))

    return rule


def batch_norm(made: Joiner, node: fx.Node) -> State | None:
    """Return a norm by running statistics; None: it takes the batch's, which couples samples."""
    is_back = node.target is aten.native_batch_norm_backward.default
    if node.args[7 if is_back else 5]:
        return None
    return (
        _Batched((0, 1), _NORM_BACK)(made, node)
        if is_back
        else _Batched((0,), (0, None, None))(made, node)
    )


def embedding_backward(made: Joiner, node: fx.Node) -> State | None:
    """Return the gradient of a table, summed over all samples."""
    gradient, index, *more = _untyped(node.args)
    dim = made.dim_of(index)
    dim = made.dim_of(gradient) if dim is None else dim
    if node not in made.to_sum or dim is None or more[2]:  # scaled by how often each row is read
        return None
    outer = made.outer_of(node.all_input_nodes)
    one, other = (made.beside(each, dim, node, outer) for each in (gradient, index))
    if one is None or other is None:
        return None
    return made.sum_op(node, (one, other, *more))


def put_back(made: Joiner, node: fx.Node) -> State | None:
    """Return the gradient of values picked at an index of the batch, added up in zeros."""
    target, places, values, *more = _untyped(node.args)
    given: list[fx.Node] = [each for each in places if each is not None]
    is_zero = isinstance(target, fx.Node) and "zeros" in str(target.target)
    if node not in made.to_sum or not is_zero or more != [True] or not made.is_same(target):
        return None
    if len(given) != 1 or places[0] is None or given[0].meta["val"].dtype.itemsize == 1:
        return None
    (index,), dim = given, made.dim_of(given[0])
    if dim is None or shape_of(values)[: len(shape_of(index))] != shape_of(index):
        return None
    one, value = (made.beside(each, dim, node, made.outer_of(given)) for each in (index, values))
    if one is None or value is None:
        return None
    own = [one if each is not None else None for each in places]
    return made.sum_op(node, (made.same(target), own, value, True))


def _untyped(args: Any) -> Any:
    return args


_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACK = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_NORM_BACK = (0, SUMMED, SUMMED)

RULES: dict[Any, Rule] = {
    aten.convolution.default: _Batched((0,)),
    aten.convolution_backward.default: _Batched((0, 1), _NORM_BACK),
    aten.native_layer_norm.default: layer_norm((0,), 1, (0, 0, 0)),
    aten.native_layer_norm_backward.default: layer_norm((0, 1, 3, 4), 2, _NORM_BACK),
    aten._fused_rms_norm.default: layer_norm((0,), 1, (0, 0)),
    aten._fused_rms_norm_backward.default: layer_norm((0, 1, 3), 2, (0, SUMMED)),
    aten.native_group_norm.default: _Batched((0,), (0, 0, 0), counts=3),
    aten.native_group_norm_backward.default: _Batched((0, 1, 2, 3), _NORM_BACK, counts=5),
    aten.max_pool2d_with_indices.default: _Batched((0,), (0, 0), rank=4),
    aten.max_pool2d_with_indices_backward.default: _Batched((0, 1, 7), rank=4),
    aten.avg_pool2d.default: _Batched((0,), rank=4),
    aten.avg_pool2d_backward.default: _Batched((0, 1), rank=4),
    aten._adaptive_avg_pool2d.default: _Batched((0,), rank=4),
    aten._adaptive_avg_pool2d_backward.default: _Batched((0, 1), rank=4),
    aten.upsample_nearest2d.default: _Batched((0,), rank=4),
    aten.upsample_nearest2d_backward.default: _Batched((0,), sizes=2, rank=4),
    aten.upsample_bilinear2d.default: _Batched((0,), rank=4),
    aten.upsample_bilinear2d_backward.default: _Batched((0,), sizes=2, rank=4),
    aten.reflection_pad2d.default: _Batched((0,), rank=4),
    aten.reflection_pad2d_backward.default: _Batched((0, 1), rank=4),
    aten.pixel_shuffle.default: _Batched((0,), rank=4),
    aten._thnn_fused_lstm_cell.default: _Batched((0, 1, 2), (0, 0, 0)),
    aten.mkldnn_rnn_layer.default: recurrent(
        (1, None, None, None, None, 0, 0), (1, 0, 0, None), packed=8
    ),
    aten.mkldnn_rnn_layer_backward.default: recurrent(
        (1, None, None, None, None, 0, 0, 1, 0, 0, 1, 0, 0),
        (1, SUMMED, SUMMED, SUMMED, SUMMED, 0, 0),
        packed=20,
    ),
    _CPU: attention(3, (0, 0)),
    _CPU_BACK: attention(6, (0, 0, 0)),
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient,
    aten._scaled_dot_product_flash_attention.default: _Batched(
        (0, 1, 2), (0, 0, None, None, None, None, None, None, None)
    ),
    aten._scaled_dot_product_flash_attention_backward.default: _Batched(
        (0, 1, 2, 3, 4, 5), (0, 0, 0)
    ),
    aten.native_batch_norm.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.index_put.default: put_back,
}
