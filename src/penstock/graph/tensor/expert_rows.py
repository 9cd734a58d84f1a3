"""Expert rows: what can be done with rows of which each is one rank's, before they are summed.

Where experts are divided, each rank has the rows of its own and zeros in the others
(`Partial` with rows); what keeps zeros keeps that.  What makes other numbers of zeros - a sigmoid,
1 more - makes rows of which the others' are of no worth (`Filled`): a product with rows of zeros
has zeros again, a product of experts looks at a rank's own, and else they become zeros before they
are summed.

A bias of each expert, [E, N], is looked up row by row: each rank has those of its experts, and the
gradient of these needs no sum.  That is so where rows are known to be sorted by their expert: the
index is a sorted result of `topk` or `argmax` over as many, and the ends of groups are the sums of
its histogram.

Ignores:  an infinite number that rows of zeros are multiplied with, which all ranks have.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from penstock.graph import by_rows
from penstock.graph.dims import aten, shape_of
from penstock.graph.tensor.op_choice import (
    OpChoice,
    OpSeries,
    OpWriter,
    States,
    all_whole,
    given,
    single,
)
from penstock.graph.tensor.sorted_rows import ends_of
from penstock.graph.tensor.value_placement import (
    PARTIAL,
    WHOLE,
    Filled,
    Partial,
    Placement,
    Slices,
)

Given = Mapping[fx.Node, fx.Node]
_LIBRARY: Any = by_rows.LIBRARY
_LIBRARY.define("own_rows_only(Tensor rows, Tensor ends, int dim, int ranks, int rank) -> Tensor")


def owned_rows(ends_E: Tensor, rows: int, ranks: int, rank: int) -> Tensor:
    """Return of so many rows which are of a rank's experts; nothing is waited for."""
    count, at_R = len(ends_E) // ranks, torch.arange(rows, device=ends_E.device)
    own = at_R < ends_E[(rank + 1) * count - 1]
    return own & (at_R >= ends_E[rank * count - 1]) if rank else own


def own_rows_only(rows: Tensor, ends_E: Tensor, dim: int, ranks: int, rank: int) -> Tensor:
    """Return rows with zeros in those that are not of a rank's experts; they lie along `dim`."""
    own_R = owned_rows(ends_E, rows.shape[dim], ranks, rank)
    shape = [1] * rows.dim()
    shape[dim] = -1
    return torch.where(own_R.view(shape), rows, rows.new_zeros(()))


_LIBRARY.impl("own_rows_only", own_rows_only, "CompositeExplicitAutograd")
OWN_ROWS_ONLY: Any = torch.ops.penstock.own_rows_only.default
RANKED = (OWN_ROWS_ONLY,)  # its last argument is the rank's number

KEEP_ZERO = (  # of one number; what is no number's gradient
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.tanh.default,
    aten.abs.default,
    aten.leaky_relu.default,
    aten.elu.default,
    aten._to_copy.default,
)
GRADIENTS = (  # of those and of others; without a gradient they are 0
    aten.silu_backward.default,
    aten.gelu_backward.default,
    aten.threshold_backward.default,
    aten.tanh_backward.default,
    aten.sigmoid_backward.default,
    aten.leaky_relu_backward.default,
)
FINITE = (  # of numbers that are; they make others of zeros
    *KEEP_ZERO,
    *GRADIENTS,
    aten.sigmoid.default,
    aten.exp.default,
    aten.neg.default,
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.clamp.default,
    aten.where.self,
    aten.ge.Scalar,
    aten.gt.Scalar,
    aten.le.Scalar,
    aten.lt.Scalar,
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_not.default,
)


def are_rows(place: Placement) -> TypeGuard[Partial | Filled]:
    """Return whether each row is one rank's."""
    return isinstance(place, Filled) or (isinstance(place, Partial) and bool(place.rows))


def elementwise(node: fx.Node, states: States) -> Iterator[OpChoice]:
    """Yield what is made, number by number, of rows and of what all ranks have."""
    places = {each: single(states, each) for each in node.all_input_nodes}
    own = {each: place for each, place in places.items() if are_rows(place)}
    found = {(place.rows, place.dim) for place in own.values()}
    if len(found) != 1 or any(shape_of(each) != shape_of(node) for each in own):
        return
    ((rows, dim),) = found
    wants = {each: own.get(each, WHOLE) for each in places}
    if _keeps_zeros(node, own):
        yield OpChoice(wants, Partial(rows, dim))
    elif node.target in FINITE:
        yield OpChoice(wants, Filled(rows, dim))


def _keeps_zeros(node: fx.Node, own: Mapping[fx.Node, Placement]) -> bool:
    """Return whether zeros are made of those in rows."""
    arguments = given(node)
    zeros = {each for each, place in own.items() if isinstance(place, Partial)}
    first = arguments[0]
    match node.target:
        case aten.mul.Tensor | aten.mul.Scalar:
            return bool(zeros)
        case aten.add.Tensor | aten.sub.Tensor:
            return all(each in zeros for each in arguments[:2])
        case aten.div.Tensor | aten.div.Scalar:
            return first in zeros and arguments[1] not in own
        case aten.pow.Tensor_Scalar:
            return first in zeros and arguments[1] > 0
        case aten.clamp.default:
            least, most = (*arguments[1:], None, None)[:2]
            return first in zeros and (least or 0) <= 0 <= (most or 0)
        case aten.where.self:
            return all(each in zeros or _is_zero(each) for each in arguments[1:])
        case target:
            return target in (*KEEP_ZERO, *GRADIENTS) and first in zeros


def through(node: fx.Node, place: Partial, dim: int | None) -> Partial:
    """Return the sum that is due of a view of one; `dim`: that of its rows in the view."""
    return place.along(dim) if place.rows and dim is not None else PARTIAL


# -- look-ups of rows -----------------------------------------------------------------------------


def indexed(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Yield places of a sum that is due: by their numbers, which all have; and experts' biases."""
    source: Any = given(node)[0]
    place, wants = single(states, source), all_whole(node)
    if isinstance(place, Partial):
        yield OpChoice({**wants, source: place}, PARTIAL)
    experts = shape_of(source)[0] if shape_of(source) else 0
    if node.target is aten.index.Tensor and place in (WHOLE, Slices(0)) and not experts % ranks:
        for ends in (each for each in ends_of(given(node)[1], experts) if each in states):
            yield _biases(node, source, ends)


def _biases(node: fx.Node, source: fx.Node, ends: fx.Node) -> OpChoice:
    """Return the choice that looks up the rows of a rank's experts, and has zeros in others."""
    (at,) = given(node)[1]

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        local = _local(write, own[at], shape_of(source)[0])
        rows = write.new(aten.index.Tensor, own[source], [local])
        return (write.new(OWN_ROWS_ONLY, rows, own[ends], 0, write.ranks, write.rank),)

    wants: dict[fx.Node, Placement] = {source: Slices(0), at: WHOLE, ends: WHOLE}
    return OpChoice(wants, Partial(ends.name), OpSeries(build))


def _local(write: OpWriter, at: fx.Node, experts: int) -> Any:
    """Return each row's expert among a rank's own; of other ranks' rows, any of these."""
    return write.new(aten.remainder.Scalar, at, experts // write.ranks)


def put_into_zeros(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Yield zeros to which a sum that is due is added at places that all have; and gradients of
    experts' biases.
    """
    into, value = _put(node)
    place, wants = single(states, value), all_whole(node)
    if isinstance(place, Partial) and _is_zero(into):
        yield OpChoice({**wants, value: place}, PARTIAL)
    if node.target is aten.index_put.default and value is not None and _is_zero(into):
        yield from _of_biases(node, states)


def _of_biases(node: fx.Node, states: States) -> Iterator[OpChoice]:
    """Yield the gradient of a rank's experts' biases: of its own rows."""
    into, at, value = given(node)[:3]
    experts, place = shape_of(into)[0], single(states, value)
    for ends in ends_of(at, experts):
        tables = [each.args[0] for each in at[0].users if each.target is aten.index.Tensor]
        sliced = [single(states, each) for each in tables if shape_of(each) == shape_of(into)]
        if Slices(0) in sliced:
            rows = place if are_rows(place) and place.rows == ends.name else WHOLE
            yield _summed_by_expert(node, ends, rows)


def _summed_by_expert(node: fx.Node, ends: fx.Node, place: Placement) -> OpChoice:
    into, (at,), value = given(node)[:3]

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        new, (experts, *sizes) = write.new, shape_of(into)
        rows = own[value]
        if not isinstance(place, Partial):
            rows = new(OWN_ROWS_ONLY, rows, own[ends], 0, write.ranks, write.rank)
        zeros = new(aten.new_zeros.default, rows, [experts // write.ranks, *sizes])
        local = _local(write, own[at], experts)
        return (new(aten.index_put.default, zeros, [local], rows, True),)

    wants: dict[fx.Node, Placement] = {into: WHOLE, at: WHOLE, value: place, ends: WHOLE}
    return OpChoice(wants, Slices(0), OpSeries(build))


def _put(node: fx.Node) -> tuple[Any, Any]:
    """Return the tensor that an op adds to, and the one it adds; None: it replaces numbers."""
    arguments = given(node)
    match node.target:
        case aten.index_put.default:
            adds = (len(arguments) > 3 and arguments[3]) or node.kwargs.get("accumulate")
            return arguments[0], arguments[2] if adds else None
        case aten.index_add.default:
            return arguments[0], arguments[3] if not node.kwargs else None
        case _:  # scatter_add
            return arguments[0], arguments[3]


def _is_zero(node: Any) -> bool:
    zeros = aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default
    full = aten.full.default, aten.full_like.default, aten.new_full.default
    full = *full, aten.scalar_tensor.default
    return node.target in zeros or (node.target in full and node.args[-1] == 0)


def of_its_own(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Yield a new tensor that takes a dtype of another one, and none of its numbers."""
    (source,) = node.all_input_nodes
    if (place := single(states, source)) != WHOLE:
        yield OpChoice({source: place}, WHOLE)


PUTS = aten.index_put.default, aten.index_add.default, aten.scatter_add.default
PICKS = aten.index.Tensor, aten.index_select.default, aten.gather.default
MAKERS = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
