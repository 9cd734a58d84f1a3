"""By place: which buffers of a traced step have a row for each place of a step, and no other use.

Such a buffer (penstock/step_places.py) is read and written at the row of the micro-batch's own
place alone, which comes with the batch.  Then no micro-batch of a step depends on another one by
it, and whoever takes a place may hold its row.  That is read off the ops of the traced step.

Ignores:  that the places of a step are unlike, and those of all steps alike; who makes the batches
          sees to that.
"""

from typing import Any

import torch
from torch import fx

from penstock.graph.graph import Node
from penstock.graph.trace import Capture
from penstock.step_places import CARRY

aten = torch.ops.aten
_READS, _WRITES = aten.index_select.default, aten.index_copy.default
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default)


def rows_by_place(capture: Capture) -> dict[str, int]:
    """Return the places of each buffer that is read and written at the batch's own place alone."""
    nodes, rows = capture.fx_nodes, capture.graph.nodes
    kinds = dict(zip(nodes, rows, strict=True))
    found: dict[str, int] = {}
    for at in sorted(capture.graph.written):
        row = rows[at]
        if row.name.startswith(f"{CARRY}.") and row.shape and _is_by_place(nodes[at], kinds):
            found[row.name] = row.shape[0]
    return found


def _is_by_place(buffer: fx.Node, kinds: dict[fx.Node, Node]) -> bool:
    """Return whether each use of the buffer, as it was and as it becomes, is of one row.

    What is written in between is a buffer of its own in the trace: it is followed, too.
    """
    places = set[fx.Node]()
    left, seen = [buffer], {buffer}
    while left:
        value = left.pop()
        for user in value.users:
            if user.op == "output" or (
                user.target is aten.copy_.default and user.args[0] is buffer
            ):
                continue
            if user.target not in (_READS, _WRITES) or user.args[:2] != (value, 0):
                return False
            places.add(_leaf(user.args[2]))
            if user.target is _WRITES and user not in seen:
                if value in user.args[3:]:
                    return False
                seen.add(user)
                left.append(user)
    (place, *others) = places or {buffer}
    row = kinds.get(place)
    is_place = row is not None and row.kind == "input" and row.shape == () and row.dtype == "int64"
    return is_place and not others


def _leaf(index: Any) -> fx.Node:
    """Return the node of which an index is a view."""
    while index.op == "call_function" and index.target in _VIEWS:
        index = index.args[0]
    return index
