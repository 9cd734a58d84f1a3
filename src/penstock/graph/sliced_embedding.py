"""Sliced embedding: rows of an embedding whose weight is in slices, and their gradient.

Each token's row comes from the slice in which its index lies; in the others it is looked up as some
other row, which does not count.  To the bit what the whole gives, and so is the gradient.
"""

from itertools import pairwise
from typing import Any

from torch import fx

from penstock.graph.slicing import (
    Ends,
    NewNode,
    Sliced,
    SliceTurn,
    Slicing,
    State,
    as_node,
    aten,
    leads_to,
    refusal,
    sliced_of,
)


def embedding(made: Slicing, node: fx.Node) -> State | None:
    """Return the rows of an embedding, slice by slice; each slice fills in its own rows.

    An index that is no row at all meets the first or the last slice as it is, and is refused
    there as in the whole.
    Raises:   GraphError: its gradient is scaled by how often a row is read, which no slice knows.
    """
    weight, index, more = as_node(node.args[0]), as_node(node.args[1]), node.args[2:]
    state = made.states[weight]
    is_whole = isinstance(made.states[index], NewNode)
    if not isinstance(state, Sliced) or state.dim != 0 or not is_whole:
        return None
    if len(more) > 1 and more[1]:
        name = next(name for name in made.ends if leads_to(weight, name, made.rows))
        raise refusal(name, "its gradient is scaled by how often each row is read")
    found: NewNode | None = None
    for turn, part in made.turns(state, node):
        inside, local = _local(made, turn, node, index, state.ranges[turn.number])
        one = made.of(turn, node, node.target, part, local)
        if found is not None:
            mask = made.before(turn, node, aten.unsqueeze.default, inside, -1)
            one = made.of(turn, node, aten.where.self, mask, one, found)
        found = one
    assert found is not None, "there are slices"
    found.value = node.meta["val"]
    return found


def embedding_backward(made: Slicing, node: fx.Node) -> State | None:
    """Return the gradients of the rows of each slice.

    Those of other slices, and of the padding, go to one row more, which is left out.
    """
    gradient, index, padding = as_node(node.args[0]), as_node(node.args[1]), node.args[3]
    if node not in made.wanted:
        return None
    ends = made.wanted[node][1]
    whole, ranges = made.whole(gradient, node), list(pairwise((0, *ends)))
    parts: dict[SliceTurn, NewNode] = {}
    for turn in _turns(made, node, ends):
        start, end = ranges[turn.number]
        _, local = _local(made, turn, node, index, (start, end), outside=end - start)
        if isinstance(padding, int) and start <= padding < end:
            counts = made.before(turn, node, aten.ne.Scalar, local, padding - start)
            local = made.before(turn, node, aten.where.ScalarOther, counts, local, end - start)
        more: Any = end - start + 1, end - start, False
        one = made.of(turn, node, node.target, whole, local, *more)
        parts[turn] = made.of(turn, node, aten.slice.Tensor, one, 0, 0, end - start)
    return sliced_of(0, ends, parts)


def _turns(made: Slicing, node: fx.Node, ends: Ends) -> list[SliceTurn]:
    run = made.rows[node].phase, made.index[node]
    return [SliceTurn(number, len(ends), run) for number in reversed(range(len(ends)))]


def _local(
    made: Slicing,
    turn: SliceTurn,
    node: fx.Node,
    index: fx.Node,
    rows: tuple[int, int],
    *,
    outside: int = 0,
) -> tuple[NewNode, NewNode]:
    """Return a mask of the indices that lie in a slice, and the indices from its first row on.

    outside:  index that stands for those of other slices.
    """
    whole, (start, end) = made.whole(index, node), rows
    inside = made.before(turn, node, aten.lt.Scalar, whole, end)
    if turn.number > 0:
        after = made.before(turn, node, aten.ge.Scalar, whole, start)
        is_last = turn.number == turn.among - 1
        both = aten.bitwise_and.Tensor, after, inside
        inside = after if is_last else made.before(turn, node, *both)
    here = made.before(turn, node, aten.sub.Tensor, whole, start) if start else whole
    return inside, made.before(turn, node, aten.where.ScalarOther, inside, here, outside)
