"""Experts: products by groups of rows, each group with a matrix of its own, divided by experts.

A mixture of experts sorts its rows by the expert that sees them; `_grouped_mm` multiplies the rows
of each with that expert's matrix.  Each rank has the matrices of some experts, one after the other:

    y = grouped_mm(x [R, d], w [E, d, n], ends)    each rank: the rows of its experts, zeros in
                                                   the others
    w.grad = grouped_mm(x.T, y.grad, ends)         each rank: those of its experts

What comes of it is a sum that is due, of which each row is one rank's: so what keeps zeros - an
activation, a product with what every rank has, or with such rows (expert_rows.py) - needs no
collect.  How many rows a rank computes is told by the data, not by shapes: none is left out, none
has a capacity.

Keeps:    every row, as the plain step computes it.
Costs:    a sum of all tokens' rows where they leave the experts, and of their gradients; a rank
          waits for the one whose experts see most rows.
Ignores:  rows of other ranks' experts, which hold zeros, are held and passed through activations.
Source:   GShard, arXiv:2006.16668, with sums in place of its exchanges: ranks that divide the ops
          of a stage have the same tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import (
    register_flop_formula,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.graph import by_rows
from penstock.graph.dims import aten, shape_of
from penstock.graph.tensor.expert_rows import are_rows
from penstock.graph.tensor.op_choice import (
    OpChoice,
    OpSeries,
    OpWriter,
    States,
    given,
    single,
)
from penstock.graph.tensor.value_placement import PARTIAL, WHOLE, Partial, Placement, Slices

GROUPED: Any = aten._grouped_mm.default
_LIBRARY: Any = by_rows.LIBRARY
_LIBRARY.define("own_rows_mm(Tensor rows, Tensor weights, Tensor ends, int rank) -> Tensor")
_LIBRARY.define(
    "own_experts_mm(Tensor left, Tensor right, Tensor ends, int ranks, int rank) -> Tensor"
)


def _own(ends_E: Tensor, count: int, rank: int) -> tuple[int, int, Tensor]:
    """Return where the rows of a rank's `count` experts begin and end, and each one's end there."""
    first = rank * count
    start = int(ends_E[first - 1]) if first else 0
    own = ends_E[first : first + count]
    return start, int(own[-1]), own - start


def own_rows_mm(rows_RD: Tensor, weights_END: Tensor, ends_E: Tensor, rank: int) -> Tensor:
    """Return the product of the rows of a rank's experts with their matrices, zeros for others'.

    rows_RD:      of all experts, in their order.
    weights_END:  those of this rank's experts, [experts / ranks, D, N].
    ends_E:       where each expert's rows end, of all experts.
    """
    made = rows_RD.new_zeros(len(rows_RD), weights_END.shape[2])
    start, stop, own = _own(ends_E, len(weights_END), rank)
    if start < stop:
        made[start:stop] = GROUPED(rows_RD[start:stop], weights_END, own)
    return made


def own_experts_mm(
    left_DR: Tensor, right_RN: Tensor, ends_E: Tensor, ranks: int, rank: int
) -> Tensor:
    """Return of a rank's experts the products of their columns with their rows: [E / ranks, D, N].

    They are gradients of experts' matrices, of an input, turned, and a gradient.
    """
    count = len(ends_E) // ranks
    start, stop, own = _own(ends_E, count, rank)
    if start == stop:
        return left_DR.new_zeros(count, len(left_DR), right_RN.shape[1])
    return GROUPED(left_DR[:, start:stop], right_RN[start:stop], own)


def _turned(ends_E: Tensor, count: int, rank: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return of a rank's experts the order of rows that begins with theirs, each one's end there,
    and whether each row is theirs; nothing is waited for.
    """
    first, at_R = rank * count, torch.arange(rows, device=ends_E.device)
    start = ends_E[first - 1] if first else torch.zeros_like(ends_E[0])
    own = ends_E[first : first + count] - start
    return (at_R + start) % max(1, rows), own, (at_R >= start) & (at_R < start + own[-1])


def queued_rows_mm(rows_RD: Tensor, weights_END: Tensor, ends_E: Tensor, rank: int) -> Tensor:
    """As `own_rows_mm`, where reading a number would wait for the device."""
    order_R, own, is_own_R = _turned(ends_E, len(weights_END), rank, len(rows_RD))
    made = GROUPED(rows_RD[order_R], weights_END, own)
    back = torch.empty_like(made).index_copy_(0, order_R, made)
    return torch.where(is_own_R[:, None], back, back.new_zeros(()))


def queued_experts_mm(
    left_DR: Tensor, right_RN: Tensor, ends_E: Tensor, ranks: int, rank: int
) -> Tensor:
    """As `own_experts_mm`, where reading a number would wait for the device."""
    order_R, own, _ = _turned(ends_E, len(ends_E) // ranks, rank, len(right_RN))
    return GROUPED(left_DR.t()[order_R].t(), right_RN[order_R], own)


def _rows_seen(rows: Tensor, weights: Tensor, ends: Tensor, rank: int) -> Tensor:
    return rows.new_empty(len(rows), weights.shape[2])


def _experts_seen(left: Tensor, right: Tensor, ends: Tensor, ranks: int, rank: int) -> Tensor:
    return left.new_empty(len(ends) // ranks, len(left), right.shape[1])


for _name, _call, _queued, _seen in (
    ("own_rows_mm", own_rows_mm, queued_rows_mm, _rows_seen),
    ("own_experts_mm", own_experts_mm, queued_experts_mm, _experts_seen),
):
    _LIBRARY.impl(_name, _call, "CPU")
    _LIBRARY.impl(_name, _queued, "CUDA")
    _LIBRARY.impl(_name, _seen, "Meta")
OWN_ROWS_MM: Any = torch.ops.penstock.own_rows_mm.default
OWN_EXPERTS_MM: Any = torch.ops.penstock.own_experts_mm.default


def _flop_of_rows(
    rows: Sequence[int], weights: Sequence[int], ends: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return the flop of a rank whose experts see as many rows as others."""
    return 2 * rows[0] * rows[1] * weights[2] * weights[0] // ends[0]


def _flop_of_experts(
    left: Sequence[int], right: Sequence[int], ends: Sequence[int], ranks: int, *_: Any, **__: Any
) -> int:
    return 2 * left[0] * left[1] * right[1] // ranks


register_flop_formula(torch.ops.penstock.own_rows_mm)(_flop_of_rows)
register_flop_formula(torch.ops.penstock.own_experts_mm)(_flop_of_experts)


# -- rules ----------------------------------------------------------------------------------------


def grouped(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Yield products of rows with experts' matrices, and gradients of these."""
    left, right, ends, *more = _operands(node)
    if not isinstance(ends, fx.Node) or any(each is not None for each in more):
        return
    one, other = single(states, left), single(states, right)
    if len(shape_of(left)) == 2 and len(shape_of(right)) == 3:
        if other == Slices(0):
            yield _rows_by_experts(node, _own_rows(one, ends, 0))
        if isinstance(other, Slices) and other.dim == 2:
            yield OpChoice({left: WHOLE, right: other, ends: WHOLE}, other.along(1))
        inner = one if isinstance(one, Slices) and one.dim == 1 else None
        if inner or (isinstance(other, Slices) and other.dim == 1):
            place = inner or other
            assert isinstance(place, Slices), "one of them is sliced"
            wants: dict[Any, Placement] = {left: place.along(1), right: place.along(1), ends: WHOLE}
            yield OpChoice(wants, PARTIAL)
    elif len(shape_of(left)) == len(shape_of(right)) == 2:
        places = _own_rows(one, ends, 1), _own_rows(other, ends, 0)
        if places != (WHOLE, WHOLE):
            yield _experts_by_rows(node, *places)
        if isinstance(one, Slices) and one.dim == 0:
            yield OpChoice({left: one, right: WHOLE, ends: WHOLE}, one.along(1))
        if isinstance(other, Slices) and other.dim == 1:
            yield OpChoice({left: WHOLE, right: other, ends: WHOLE}, other.along(2))


def _operands(node: fx.Node) -> tuple[Any, ...]:
    return *given(node), *node.kwargs.values()


def _own_rows(place: Placement, ends: fx.Node, dim: int) -> Placement:
    """Return a placement of rows of each rank's experts, which end so; whole, if it is another."""
    return place if are_rows(place) and (place.rows, place.dim) == (ends.name, dim) else WHOLE


def _rows_by_experts(node: fx.Node, x: Placement) -> OpChoice:
    left, right, ends, *_ = _operands(node)

    def build(write: OpWriter, own: Mapping[fx.Node, fx.Node]) -> tuple[Any]:
        return (write.new(OWN_ROWS_MM, own[left], own[right], own[ends], write.rank),)

    wants: dict[fx.Node, Placement] = {left: x, right: Slices(0), ends: WHOLE}
    return OpChoice(wants, Partial(ends.name), OpSeries(build))


def _experts_by_rows(node: fx.Node, x: Placement, gradient: Placement) -> OpChoice:
    left, right, ends, *_ = _operands(node)

    def build(write: OpWriter, own: Mapping[fx.Node, fx.Node]) -> tuple[Any]:
        about = own[left], own[right], own[ends], write.ranks, write.rank
        return (write.new(OWN_EXPERTS_MM, *about),)

    wants: dict[fx.Node, Placement] = {left: x, right: gradient, ends: WHOLE}
    return OpChoice(wants, Slices(0), OpSeries(build))


RANKED = OWN_ROWS_MM, OWN_EXPERTS_MM  # their last argument is the rank's number
