"""Tokens: rules of a step of which each rank has some tokens of every sequence, and all weights.

    before   k, v = ...           y = attend(q, k, v)
    after    both = stack(k, v)   y = attend(q, collect(both, gather), own tokens of q)

Look-ups begin it: each rank looks up its own tokens.  Attention gathers keys and values, forward
and once more backward, so that what all tokens have is held while one attention is computed; their
gradients are summed and scattered.  A loss over classes adds up each rank's rows.

Keeps:    loss and gradients, to rounding; a gradient of weights is a sum that is due at the end of
          the step (schedule/grid.py).
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from penstock.graph import by_rows
from penstock.graph.dims import aten, shape_of
from penstock.graph.joined.along import argument
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
from penstock.graph.tensor.token_attention import ATTEND_TOKENS, ATTEND_TOKENS_BACKWARD
from penstock.graph.tensor.value_placement import PARTIAL, WHOLE, Placement, Slices, fits

_RUNS = 2  # a block of the front and one of the back: causal attention is then shared evenly
_SUM = 2  # torch's number for a loss that is a sum
Given = Mapping[fx.Node, fx.Node]


def tokens_of(dim: int) -> Slices:
    """Return the slices of tokens along a dim."""
    return Slices(dim, _RUNS, folded=True)


def multiple(ranks: int) -> int:
    """Return the number of which the tokens of a sequence must be a multiple."""
    return _RUNS * ranks


def input_place(node: fx.Node, ranks: int) -> Placement:
    """Return where an input of the step begins: numbers of tokens, [B, T, D], in slices."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() != 3 or not value.is_floating_point():
        return WHOLE
    return tokens_of(1) if fits(tokens_of(1), tuple(value.shape), ranks) else WHOLE


# -- look-ups -------------------------------------------------------------------------------------


def _looked_up(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    table, index = given(node)[:2]
    place = tokens_of(len(shape_of(index)) - 1)
    if shape_of(index) and fits(place, shape_of(index), ranks):
        yield OpChoice({table: WHOLE, index: place}, place)


# -- attention ------------------------------------------------------------------------------------


def _place(states: States, nodes: Any) -> Slices | None:
    """Return where queries or keys are, [B, H, T, d], if they are in slices of tokens."""
    places = {single(states, each) for each in nodes if isinstance(each, fx.Node)}
    return tokens_of(2) if tokens_of(2) in places else None


def _can_gather(node: fx.Node, query: Any, key: Any, value: Any) -> bool:
    """Return whether keys and values lie alike, and those of a causal attention as queries do."""
    if argument(node, "dropout_p") or shape_of(key) != shape_of(value):
        return False
    return not argument(node, "is_causal") or shape_of(query) == shape_of(key)


def _mask_place(mask: Any, query: fx.Node) -> dict[fx.Node, Placement]:
    """Return the place of a mask, [..., T, T]: a rank needs the rows of its queries."""
    if not isinstance(mask, fx.Node):
        return {}
    dim, shape = len(shape_of(mask)) - 2, shape_of(mask)
    alike = dim >= 0 and shape[dim] == shape_of(query)[2]
    return {mask: tokens_of(dim) if alike else WHOLE}


def _gathered(write: OpWriter, own: Given, key: fx.Node, value: fx.Node) -> Any:
    both = write.new(aten.stack.default, [own[key], own[value]])
    return write.new(COLLECT, both, "gather", write.ranks)


def _size_bytes(*nodes: fx.Node) -> float:
    return float(sum(each.meta["val"].numel() * each.meta["val"].itemsize for each in nodes))


def _attended(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    query, key, value = given(node)[:3]
    place = _place(states, (query, key, value))
    if place is None or not _can_gather(node, query, key, value):
        return
    mask: Any = argument(node, "attn_mask")
    seen = _mask_place(mask, query)

    def build(write: OpWriter, own: Given) -> tuple[Any, Any]:
        every = _gathered(write, own, key, value)
        how = own.get(mask), bool(argument(node, "is_causal")), argument(node, "scale"), write.rank
        both = write.new(ATTEND_TOKENS, own[query], every, *how)
        return write.new(operator.getitem, both, 0), write.new(operator.getitem, both, 1)

    several = OpSeries(build, gathered_bytes=_size_bytes(key, value))
    wants = {**dict.fromkeys((query, key, value), place), **seen}
    yield OpChoice(wants, (place, place), several)


def _attended_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    grad, query, key, value, out, logs = given(node)[:6]
    place = _place(states, (grad, query, key, value))
    if place is None or not _can_gather(node, query, key, value):
        return
    mask: Any = argument(node, "attn_mask")
    seen = _mask_place(mask, query)

    def build(write: OpWriter, own: Given) -> tuple[Any, Any, Any]:
        new, every = write.new, _gathered(write, own, key, value)
        how = own.get(mask), bool(argument(node, "is_causal")), argument(node, "scale"), write.rank
        rest = (own[each] for each in (out, logs))
        made = new(ATTEND_TOKENS_BACKWARD, own[grad], own[query], every, *rest, *how)
        parts = new(operator.getitem, made, 1)
        both = new(COLLECT, parts, "scatter", write.ranks)
        of_both = (new(aten.select.int, both, 0, at) for at in (0, 1))
        return new(operator.getitem, made, 0), *of_both

    size = _size_bytes(key, value)
    several = OpSeries(build, gathered_bytes=size, scattered_bytes=size)
    tensors = grad, query, key, value, out, logs
    yield OpChoice({**dict.fromkeys(tensors, place), **seen}, (place,) * 3, several)


# -- the loss -------------------------------------------------------------------------------------


def _rows(states: States, value: Any) -> Slices | None:
    place = single(states, value)
    if isinstance(place, Slices) and place.dim == 0 and len(shape_of(value)) == 2:
        return place
    return None


def _loss(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    output, targets, weights, reduction, ignored = given(node)
    place = _rows(states, output)
    if weights is not None or place is None:
        return
    if reduction == 0:
        yield OpChoice({output: place, targets: place}, (place, WHOLE))
        return

    def build(write: OpWriter, own: Given) -> tuple[Any, Any]:
        new, mine = write.new, write.part(own[targets], place)
        both = new(node.target, own[output], mine, None, _SUM, ignored)
        part = new(operator.getitem, both, 0)
        count = new(aten.sum.default, new(aten.ne.Scalar, own[targets], ignored))
        count = new(aten._to_copy.default, count, dtype=output.meta["val"].dtype)
        return new(aten.div.Tensor, part, count) if reduction == 1 else part, count

    yield OpChoice({output: place, targets: WHOLE}, (PARTIAL, WHOLE), OpSeries(build))


def _loss_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of a rank's rows; the number of all that count is known."""
    grad, output, targets, weights, *_ = given(node)
    place = _rows(states, output)
    if weights is None and place is not None:
        rows = {output: place, targets: place, grad: place if shape_of(grad) else WHOLE}
        yield OpChoice({**all_whole(node), **rows}, place)


def _mean(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """A mean over all numbers: the sum of what each rank has."""
    (source,) = node.all_input_nodes
    if isinstance(place := single(states, source), Slices) and not node.kwargs:

        def build(write: OpWriter, own: Given) -> tuple[Any]:
            part = write.new(aten.mean.default, own[source])
            return (write.new(aten.div.Tensor, part, write.ranks),)

        yield OpChoice({source: place}, PARTIAL, OpSeries(build))


def _widened(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """A summand in more bits: gradients of weights that are read in fewer."""
    (source,) = node.all_input_nodes
    dtype: torch.dtype = node.meta["val"].dtype
    is_wider = dtype.is_floating_point and dtype.itemsize >= source.meta["val"].dtype.itemsize
    if single(states, source) == PARTIAL and is_wider:
        yield OpChoice({source: PARTIAL}, PARTIAL)


RULES: Mapping[Any, Rule] = {
    aten.embedding.default: _looked_up,
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attended_backward,
    aten.nll_loss_forward.default: _loss,
    aten.nll_loss_backward.default: _loss_backward,
    by_rows.LOSS_BACKWARD: _loss_backward,
    aten.mean.default: _mean,
    aten._to_copy.default: _widened,
}


def token_choices(node: fx.Node, states: States, ranks: int) -> list[OpChoice]:
    """Return the ways to compute an op on some of the tokens, beside those of all divided steps."""
    rule = RULES.get(node.target)
    if rule is None:
        return []
    rows = rule(node, states, ranks)
    return [c for c in rows if all(fits(p, shape_of(s), ranks) for s, p in c.wants.items())]
