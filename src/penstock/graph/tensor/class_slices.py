"""Classes: a loss over classes, and rows of an embedding, of which each rank has some.

Log-softmax of logits [N, C] of which a rank has some columns: the logarithm of the sum of the
exponentials of its own is all that others need of it, and what they gather is one number a row:

    own = log_sum_exp(slice)        all = collect(own, gather)
    out = slice - log(sum(exp(all)))

The rank that has the target's column adds its log-probability to the loss; the others add nothing,
and the loss is a sum that is due.  Backward needs no collect: of each row of the gradient of
log-probabilities, which is not 0 at the target alone, every rank knows the sum.

An embedding by rows gives zeros where a token's row is another rank's, and is a sum that is due.

Keeps:    a target or a token that is no class at all is refused as by torch: by the first or the
          last rank.
Source:   the loss of Megatron-LM, arXiv:1909.08053, section 3, with one collect in place of three.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from penstock.graph import by_rows
from penstock.graph.dims import aten, shape_of
from penstock.graph.tensor.collect_op import COLLECT
from penstock.graph.tensor.op_choice import (
    OpChoice,
    OpSeries,
    OpWriter,
    States,
    all_whole,
    given,
    single,
)
from penstock.graph.tensor.value_placement import PARTIAL, WHOLE, Placement, Slices

_COLUMNS = Slices(1)  # of logits [N, C]
_OTHERS = -(2**62)  # a class that no target is by mistake: the target is ignored, or elsewhere
_NO_ROW = -1  # of a table; kernels of GPUs read it in 32 bits
_SUM = 2  # torch's number for a loss that is a sum
_CACHED_BYTES = 1 << 20  # of rows that are looked at once

Given = Mapping[fx.Node, fx.Node]
_LIBRARY: Any = by_rows.LIBRARY
_LIBRARY.define("log_sum_exp(Tensor logits) -> Tensor")
_LIBRARY.define(
    "loss_backward_of_columns(Tensor grad, Tensor output, Tensor own, Tensor counts,"
    " int reduction, Tensor total_weight) -> Tensor"
)


def _some_rows(value_NC: Tensor) -> Iterator[slice]:
    """Yield the rows of a matrix, so many at a time as stay in a cache."""
    step = max(1, _CACHED_BYTES // max(1, value_NC.shape[1] * value_NC.itemsize))
    for first in range(0, len(value_NC), step):
        yield slice(first, first + step)


def log_sum_exp(logits_NC: Tensor) -> Tensor:
    """Return the logarithm of the sum of the exponentials of each row; holds a few rows' only."""
    made = logits_NC.new_empty(len(logits_NC))
    for rows in _some_rows(logits_NC):
        torch.logsumexp(logits_NC[rows], 1, out=made[rows])
    return made


def loss_backward_of_columns(
    grad: Tensor,
    output_NC: Tensor,
    own_N: Tensor,
    counts_N: Tensor,
    reduction: int,
    total_weight: Tensor,
) -> Tensor:
    """Return the gradient of some columns of logits, of their log-probabilities `output_NC`.

    own_N:     the column of each row's target; of those elsewhere, `_OTHERS`.
    counts_N:  0 for each row whose target counts in the loss, on whatever rank; else `_OTHERS`.
    """
    made = torch.empty_like(output_NC)
    column_N1 = output_NC.new_zeros(len(output_NC), 1)
    sums = grad, column_N1, counts_N, None, reduction, _OTHERS, total_weight
    sums_N1 = aten.nll_loss_backward.default(*sums)  # as of one class: the sum of a row
    for rows in _some_rows(output_NC):
        torch.exp(output_NC[rows], out=made[rows])
        made[rows].mul_(sums_N1[rows].neg())
    at_N1 = own_N.unsqueeze(1)
    is_own = at_N1 != _OTHERS
    return made.scatter_add_(1, at_N1 * is_own, sums_N1 * is_own)


_LIBRARY.impl("log_sum_exp", log_sum_exp, "CompositeExplicitAutograd")
_LIBRARY.impl("loss_backward_of_columns", loss_backward_of_columns, "CompositeExplicitAutograd")
_LOG_SUM_EXP: Any = torch.ops.penstock.log_sum_exp.default
_LOSS_BACKWARD: Any = torch.ops.penstock.loss_backward_of_columns.default


# -- whose class it is ----------------------------------------------------------------------------


def _owned(write: OpWriter, places: fx.Node, classes: int) -> tuple[Any, Any]:
    """Return whether each class is this rank's, and its place among this rank's.

    One that is no class at all is the first rank's or the last one's, and out of its range.
    """
    new, size = write.new, classes // write.ranks
    device = places.meta["val"].device
    every = new(aten.arange.default, write.ranks, device=device, pin_memory=False)
    me = write.taken(every, 0, 1)
    owner = new(aten.div.Tensor_mode, places, size, rounding_mode="floor")
    owner = new(aten.clamp.default, owner, 0, write.ranks - 1)
    first = new(aten.mul.Tensor, me, size)
    return new(aten.eq.Tensor, owner, me), new(aten.sub.Tensor, places, first)


def _own_targets(
    write: OpWriter, targets: fx.Node, ignored: int, classes: int, other: int = _OTHERS
) -> tuple[Any, Any]:
    """Return this rank's targets, `other` in place of the rest; and which of all count."""
    is_own, local = _owned(write, targets, classes)
    counts = write.new(aten.ne.Scalar, targets, ignored)
    both = write.new(aten.bitwise_and.Tensor, is_own, counts)
    return write.new(aten.where.ScalarOther, both, local, other), counts


# -- the loss -------------------------------------------------------------------------------------


def _are_columns(states: States, logits: Any) -> bool:
    """Return whether a rank has columns of a matrix, of numbers wide enough to add up."""
    value = logits.meta["val"]
    is_wide = value.dtype in (torch.float32, torch.float64)
    return single(states, logits) == _COLUMNS and value.dim() == 2 and is_wide


def log_softmax(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Log-probabilities of logits of which each rank has some columns."""
    logits, dim, halves = given(node)
    if halves or dim not in (1, -1) or not _are_columns(states, logits):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        sums = write.new(_LOG_SUM_EXP, own[logits])
        every = write.new(COLLECT, sums, "gather", write.ranks)
        whole = write.new(aten.logsumexp.default, every, [0])
        column = write.new(aten.unsqueeze.default, whole, 1)
        return (write.new(aten.sub.Tensor, own[logits], column),)

    value = node.meta["val"]
    gathered = float(ranks * len(value) * value.itemsize)
    yield OpChoice({logits: _COLUMNS}, _COLUMNS, OpSeries(build, gathered_bytes=gathered))


def loss(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The loss: what the targets that are a rank's add to it."""
    output, targets, weights, reduction, ignored = given(node)
    if weights is not None or not _are_columns(states, output):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any, Any]:
        new, classes = write.new, shape_of(output)[1]
        at, counts = _own_targets(write, own[targets], ignored, classes)
        way = reduction if reduction == 0 else _SUM
        both = new(aten.nll_loss_forward.default, own[output], at, None, way, _OTHERS)
        part, count = new(operator.getitem, both, 0), new(aten.sum.default, counts)
        count = new(aten._to_copy.default, count, dtype=output.meta["val"].dtype)
        if reduction == 1:
            part = new(aten.div.Tensor, part, count)
        return part, count

    wants: dict[fx.Node, Placement] = {output: _COLUMNS, targets: WHOLE}
    yield OpChoice(wants, (PARTIAL, WHOLE), OpSeries(build))


def loss_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of the log-probabilities: not 0 at the targets that are a rank's."""
    grad, output, targets, weights, reduction, ignored, total = given(node)
    if weights is not None or not _are_columns(states, output):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        at, _ = _own_targets(write, own[targets], ignored, shape_of(output)[1])
        rest = at, None, reduction, _OTHERS, own[total]
        return (write.new(aten.nll_loss_backward.default, own[grad], own[output], *rest),)

    yield OpChoice({**all_whole(node), output: _COLUMNS}, _COLUMNS, OpSeries(build))


def joined_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of the logits, where both backward ops are one (by_rows.py)."""
    _, output, _, weights, *_ = given(node)
    if weights is None and _are_columns(states, output):
        yield _of_logits(node, node)


def log_softmax_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of the logits, of that of the log-probabilities."""
    gradient, output, dim, dtype = given(node)
    if dim not in (1, -1) or not _are_columns(states, output) or dtype != output.meta["val"].dtype:
        return
    loss = gradient
    if loss.target is aten.nll_loss_backward.default and loss.args[1:4:2] == (output, None):
        yield _of_logits(node, loss)
        return

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        new = write.new
        sums = new(aten.sum.dim_IntList, own[gradient], [1], True)
        sums = new(COLLECT, sums, "sum", write.ranks)
        shares = new(aten.exp.default, own[output])
        return (new(aten.addcmul.default, own[gradient], shares, sums, value=-1),)

    value = node.meta["val"]
    several = OpSeries(build, summed_bytes=float(len(value) * value.itemsize))
    yield OpChoice({gradient: _COLUMNS, output: _COLUMNS}, _COLUMNS, several)


def _of_logits(node: fx.Node, loss: fx.Node) -> OpChoice:
    """Return the choice that makes the gradient of the logits of what a loss's backward reads."""
    grad, output, targets, _, reduction, ignored, total = given(loss)

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        at, counts = _own_targets(write, own[targets], ignored, shape_of(output)[1])
        zeros = write.new(aten.zeros_like.default, at)
        classes = write.new(aten.where.ScalarOther, counts, zeros, _OTHERS)
        rest = at, classes, reduction, own[total]
        return (write.new(_LOSS_BACKWARD, own[grad], own[output], *rest),)

    wants: dict[fx.Node, Placement] = {grad: WHOLE, targets: WHOLE, total: WHOLE, output: _COLUMNS}
    return OpChoice(wants, _COLUMNS, OpSeries(build))


# -- rows of an embedding -------------------------------------------------------------------------


def embedding(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """Rows of a table of which each rank has some: zeros where a row is another's."""
    table, index = given(node)[:2]
    if single(states, table) != Slices(0):
        return

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        is_own, local = _owned(write, own[index], shape_of(table)[0])
        local = write.new(aten.where.ScalarOther, is_own, local, 0)
        rows = write.new(aten.embedding.default, own[table], local)
        is_own = write.new(aten.unsqueeze.default, is_own, -1)
        return (write.new(aten.where.ScalarOther, is_own, rows, 0),)

    yield OpChoice({table: Slices(0), index: WHOLE}, PARTIAL, OpSeries(build))


def embedding_backward(node: fx.Node, states: States, ranks: int) -> Iterator[OpChoice]:
    """The gradient of a rank's rows of a table; those of others are left out as padding is."""
    gradient, index, size, padding, by_count = given(node)
    tables = [each.args[0] for each in index.users if each.target is aten.embedding.default]
    rows = [single(states, table) for table in tables if shape_of(table)[0] == size]
    if by_count or Slices(0) not in rows or size % ranks:
        return

    def build(write: OpWriter, own: Given) -> tuple[Any]:
        at, _ = _own_targets(write, own[index], padding, size, _NO_ROW)
        rest = size // write.ranks, _NO_ROW, False
        return (write.new(node.target, own[gradient], at, *rest),)

    yield OpChoice({gradient: WHOLE, index: WHOLE}, Slices(0), OpSeries(build))
