"""Sliced loss: log-softmax and negative log-likelihood of logits in slices.

Forward carries from slice to slice the greatest logit of each row, the sum of the exponentials of
what is below it, and the logit of the target:

    top' = max(top, max(slice))
    total' = total exp(top - top') + sum(exp(slice - top'))

Backward makes of each slice the gradient of its logits; c is that of the target's log-probability:

    c (1 at the target, else 0) - c / total exp(slice - top)

So no slice of logits, nor of their gradient, has to be there beside another one.  Equal to the
whole to rounding: exponentials are summed in another order.

Source:  a softmax carried along, arXiv:1805.02867.
"""

from typing import Any

import torch
from torch import fx

from penstock.graph.slicing import (
    AtTargets,
    LogSoftmax,
    NewNode,
    Sliced,
    SliceTurn,
    Slicing,
    State,
    as_node,
    aten,
    sliced_of,
    wide_type,
)

_IGNORED = -(2**62)  # a class that no target is by mistake


def log_softmax(made: Slicing, node: fx.Node) -> State | None:
    """Return log-probabilities over the dim that is cut; only `top` and `total` are computed."""
    source, dim = as_node(node.args[0]), node.args[1]
    state = made.states[source]
    if not (isinstance(state, Sliced) and isinstance(dim, int)):
        return None
    if state.dim != dim % source.meta["val"].dim():
        return None
    found: tuple[NewNode, NewNode] | None = None
    for turn, part in made.turns(state, node):
        logits = made.cast(turn, node, part, wide_type(part.value.dtype))
        least = torch.finfo(logits.value.dtype).min  # of a slice of -inf, which count nothing
        top = made.of(turn, node, aten.amax.default, logits, [state.dim], True)
        top = made.of(turn, node, aten.clamp_min.default, top, least)
        top = top if found is None else made.of(turn, node, aten.maximum.default, found[0], top)
        below = made.of(turn, node, aten.sub.Tensor, logits, top)
        raised = made.of(turn, node, aten.exp.default, below)
        total = made.of(turn, node, aten.sum.dim_IntList, raised, [state.dim], True)
        if found is not None:
            less = made.of(turn, node, aten.sub.Tensor, found[0], top)
            less = made.of(turn, node, aten.exp.default, less)
            before = made.of(turn, node, aten.mul.Tensor, found[1], less)
            total = made.of(turn, node, aten.add.Tensor, before, total)
        found = top, total
    assert found is not None, "there are slices"
    return LogSoftmax(node, state, *found)


def loss(made: Slicing, node: fx.Node) -> State | None:
    """Return the loss, of the log-probabilities of the targets alone.

    A target that is no class at all is none of the one class either, and is refused as ever.
    """
    source, targets, (weight, reduction, ignored) = *map(as_node, node.args[:2]), node.args[2:]
    state = made.states[source]
    if not isinstance(state, LogSoftmax) or weight is not None or state.logits.dim != 1:
        return None
    if source.meta["val"].dim() != 2 or not isinstance(made.states[targets], NewNode):
        return None
    picked = _picked(made, node, state, targets), _one_class(made, node, state, targets, ignored)
    state.picked[targets, ignored] = picked
    found = made.new(node, node.target, *picked, None, reduction, _IGNORED)
    found.value = node.meta["val"]
    return found


def _picked(made: Slicing, node: fx.Node, state: LogSoftmax, targets: fx.Node) -> NewNode:
    """Return the log-probability of each row's target, as a column."""
    found: NewNode | None = None
    turns, read = made.turns(state.logits, node), as_node(state.node.args[0])
    for turn, part in turns:
        inside, local = _targets(made, turn, node, targets, state.logits)
        one = made.of(turn, read, aten.gather.default, part, 1, local)  # before they are raised
        if found is not None:
            one = made.of(turn, read, aten.where.self, inside, one, found)
        found = one
    assert found is not None, "there are slices"
    last, _ = turns[-1]
    wide = made.cast(last, node, found, wide_type(found.value.dtype))
    below = made.of(last, node, aten.sub.Tensor, wide, state.top)
    log = made.of(last, node, aten.log.default, state.total)
    picked = made.of(last, node, aten.sub.Tensor, below, log)
    return made.cast(last, node, picked, state.node.meta["val"].dtype)


def _one_class(
    made: Slicing, node: fx.Node, state: LogSoftmax, targets: fx.Node, ignored: Any
) -> NewNode:
    """Return targets of a loss of one class: 0, or `_IGNORED`, or how far it is from any class."""
    turn, _ = made.turns(state.logits, node)[-1]
    whole, classes = made.whole(targets, node), state.logits.ends[-1]
    known = made.before(turn, node, aten.clamp.default, whole, 0, classes - 1)
    off = made.before(turn, node, aten.sub.Tensor, whole, known)
    counts = made.before(turn, node, aten.ne.Scalar, whole, ignored)
    return made.before(turn, node, aten.where.ScalarOther, counts, off, _IGNORED)


def _targets(
    made: Slicing, turn: SliceTurn, node: fx.Node, targets: fx.Node, logits: Sliced
) -> tuple[NewNode, NewNode]:
    """Return two columns: whether each target lies in a slice, and its place there."""
    whole, (start, end) = made.whole(targets, node), logits.ranges[turn.number]
    after = made.before(turn, node, aten.ge.Scalar, whole, start)
    inside = made.before(turn, node, aten.lt.Scalar, whole, end)
    inside = made.before(turn, node, aten.bitwise_and.Tensor, after, inside)
    here = made.before(turn, node, aten.sub.Tensor, whole, start)
    local = made.before(turn, node, aten.where.ScalarOther, inside, here, 0)
    column = aten.unsqueeze.default
    return made.before(turn, node, column, inside, 1), made.before(turn, node, column, local, 1)


def loss_backward(made: Slicing, node: fx.Node) -> AtTargets | None:
    """Return the gradient of the targets' log-probabilities; all others have none."""
    gradient, source, targets = map(as_node, node.args[:3])
    reduction, ignored, counted = node.args[4], node.args[5], as_node(node.args[6])
    state = made.states[source]
    if not isinstance(state, LogSoftmax) or (targets, ignored) not in state.picked:
        return None
    given, total = made.whole(gradient, node), made.whole(counted, node)
    own = given, *state.picked[targets, ignored], None, reduction, _IGNORED, total
    return AtTargets(made.new(node, aten.nll_loss_backward.default, *own), targets, state)


def log_softmax_backward(made: Slicing, node: fx.Node) -> State | None:
    """Return the gradient of the logits, slice by slice."""
    gradient, source = as_node(node.args[0]), as_node(node.args[1])
    given, state = made.states[gradient], made.states[source]
    if not isinstance(given, AtTargets) or given.of is not state:
        return None
    return _of_logits(made, node, given)


def joined_backward(made: Slicing, node: fx.Node) -> State | None:
    """Return the gradient of the logits where both backward ops are one (by_rows.py)."""
    given = loss_backward(made, node)
    return None if given is None else _of_logits(made, node, given)


def _of_logits(made: Slicing, node: fx.Node, given: AtTargets) -> Sliced:
    dtype = node.meta["val"].dtype
    at, logits = given.at, given.of.logits
    if at.value.dtype != (wide := wide_type(at.value.dtype)):
        at = made.new(node, aten._to_copy.default, at, dtype=wide)
    share = made.new(node, aten.div.Tensor, at, given.of.total)
    share = made.new(node, aten.neg.default, share)
    parts: dict[SliceTurn, NewNode] = {}
    for turn, part in made.turns(logits, node):
        inside, local = _targets(made, turn, node, given.targets, logits)
        below = made.cast(turn, node, part, wide_type(part.value.dtype))
        below = made.of(turn, node, aten.sub.Tensor, below, given.of.top)
        raised = made.of(turn, node, aten.exp.default, below)
        found = made.of(turn, node, aten.mul.Tensor, raised, share)
        more = made.of(turn, node, aten.where.ScalarOther, inside, at, 0.0)
        found = made.of(turn, node, aten.scatter_add.default, found, 1, local, more)
        parts[turn] = made.cast(turn, node, found, dtype)
    return sliced_of(logits.dim, logits.ends, parts)
