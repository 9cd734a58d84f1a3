"""Sorted rows: where the rows of each expert end, of rows that stand in the order of their experts.

    chosen = topk(chances, k).indices          [N, k], each below E
    experts, order = sort(chosen.flatten())    of each row; or chosen.flatten()[order]
    ends = cumsum(histc(experts, E, 0, E - 1))

Ranks that divide the experts know by the ends which rows are whose; by the experts of rows they
know it as well only if both tell the same, which this file looks for.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from penstock.graph.dims import aten, shape_of

_ALIKE = (  # the same numbers, in the same order
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
_EXACT = torch.int32, torch.int64, torch.float32, torch.float64  # of the number of an expert


def ends_of(index: Any, experts: int) -> Iterator[fx.Node]:
    """Yield where the rows of each expert end, if an index of one dim has the experts of rows."""
    if len(index) != 1 or index[0] is None or len(shape_of(index[0])) != 1:
        return
    (rows,) = index
    source = _unsorted(rows)
    if source is None or not _is_chosen(source, experts):
        return
    for ends in rows.graph.find_nodes(op="call_function", target=aten.cumsum.default):
        counts = ends.args[0]
        if counts.target is aten.histc.default and counts.args[1:] == (experts, 0, experts - 1):
            counted = _alike(counts.args[0])
            if source in (counted, _unsorted(counted)):
                yield ends


def _alike(node: Any) -> Any:
    """Return the value whose numbers these are, but for their dtype."""
    while node.target in _ALIKE and node.meta["val"].dtype in _EXACT:
        node = node.args[0]
    return node


def _result_of(node: Any, *targets: Any) -> tuple[Any, int]:
    """Return the op of which a value is a result, and which; (None, 0): it is of no such op."""
    is_result = getattr(node.target, "__name__", "") == "getitem"
    made = is_result and node.args[0].target in targets
    return (node.args[0], node.args[1]) if made else (None, 0)


def _sorted_by(node: Any, result: int) -> Any:
    """Return the value of one dim that is sorted, smallest first, if this is that result of it."""
    sort, at = _result_of(node, aten.sort.default, aten.sort.stable)
    if sort is None or at != result:
        return None
    stable = sort.target is aten.sort.stable
    falls = sort.kwargs.get("descending", sort.args[2 + stable : 3 + stable] == (True,))
    return sort.args[0] if len(shape_of(sort.args[0])) == 1 and not falls else None


def _unsorted(node: Any) -> Any:
    """Return the value whose numbers these are in ascending order; None: of none."""
    node = _alike(node)
    if node.target is aten.index.Tensor and len(node.args[1]) == 1 and node.args[1][0] is not None:
        source, (order,) = node.args
        by = _sorted_by(order, 1)
        return _alike(by) if by is not None and _alike(by) is _alike(source) else None
    by = _sorted_by(node, 0)
    return None if by is None else _alike(by)


def _is_chosen(node: Any, experts: int) -> bool:
    """Return whether a value has numbers of experts that a router has chosen."""
    op, at = _result_of(node, aten.topk.default, aten.max.dim)
    if op is None:
        op, at = (node, 1) if node.target is aten.argmax.default else (None, 0)
    if op is None or at != 1:
        return False
    more = op.args[2:3] or (-1,) if op.target is aten.topk.default else op.args[1:2]
    return more not in ((), (None,)) and shape_of(op.args[0])[more[0]] == experts
