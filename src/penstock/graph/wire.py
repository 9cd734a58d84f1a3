"""Wire: the bytes of a message whose numbers are packed into a few bits each.

A row of numbers that belong together has one scale, the greatest of them by its size; each number
is then a whole number of steps of that scale:

    step = max(greatest, TINY) / most        most = 2 ** (bits - 1) - 1
    code = round(x / step)                   -most ... most, and 0 is 0
    x'   = code * step                       |x' - x| <= step / 2, but for float32's rounding

Only what is computed from weights is packed, activations and gradients of floating point, and only
where that is smaller.  Masks, tables and whole numbers go as they are.  A row with an infinity or
something that is no number arrives without any number.

Source: arXiv:2311.05827 (compression of what stages exchange, at the level of bits).
"""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from penstock.bits import AS_IT_IS
from penstock.graph.graph import Graph, Node
from penstock.sums import ALIGNED, summed_as, sums_way

TINY = 1e-30  # greatest of a row whose numbers are all smaller
_USUAL = (8, 16)  # bits that are tried beside the fewest
_LEAST_ROW = 64  # numbers that share a scale, where there are as many
_FLOATS = {"float64": 8, "float32": 4, "bfloat16": 4, "float16": 4}  # bytes of the scale of a row


def wire_choices(fewest: tuple[int, int]) -> tuple[int, ...]:
    """Return the bits among which is chosen, where a job allows so few there and back."""
    usual = (each for each in _USUAL if each > min(fewest))
    return tuple(sorted({*fewest, *usual} - {AS_IT_IS}))


def widths(bits: int) -> tuple[int, ...]:
    """Return the widths in which a code of `bits` is kept: 16, or some of 8, 4, 2 and 1."""
    return (16,) if bits == 16 else tuple(part for part in (8, 4, 2, 1) if bits & part)


def row_length(shape: tuple[int, ...]) -> int:
    """Return the count of numbers that share a scale: the last dimensions, 64 numbers or more."""
    count = 1
    for size in reversed(shape):
        if count >= _LEAST_ROW:
            break
        count *= size
    return count


def packed_bytes(shape: tuple[int, ...], dtype: str, bits: int) -> int:
    """Return the bytes of a packed tensor: its scales and its codes."""
    count = math.prod(shape)
    rows = count // max(1, row_length(shape))
    return rows * _FLOATS[dtype] + sum(-(-count * part // 8) for part in widths(bits))


def is_packed(graph: Graph, value: int, bits: int) -> bool:
    """Return whether a value is packed in a message with `bits` a number."""
    node = graph.nodes[value]
    if bits == AS_IT_IS or node.dtype not in _FLOATS or value not in graph.learned:
        return False
    return packed_bytes(node.shape, node.dtype, bits) < node.size_bytes


def message_bytes(graph: Graph, values: Iterable[int], bits: int) -> int:
    """Return the bytes of a message of these values, gaps between tensors not counted."""
    return sum(_sent_bytes(graph, value, bits) for value in values)


def _sent_bytes(graph: Graph, value: int, bits: int) -> int:
    node: Node = graph.nodes[value]
    if not is_packed(graph, value, bits):
        return node.size_bytes
    return packed_bytes(node.shape, node.dtype, bits)


def summed_bytes(
    graph: Graph,
    parameters: Iterable[int],
    sums: str | None,
    *,
    ranks: int = 2,
    shared: AbstractSet[int] = frozenset(),
) -> int:
    """Return the bytes summed over copies of these parameters: those of their gradients.

    Where other numbers are sent than a sum sends, as `sums.summed_as` says.
    sums:     how those of float32 travel; None: as they are.
              Of weights that are averaged every few steps, in the mean of these.
    ranks:    over which they are summed; shared: those of several stages, which go as they are.
    """
    way = sums_way(sums)
    if way.averages:
        whole = sum(map(graph.kept_bytes, parameters)) // way.every
        return whole * ranks // (2 * max(1, ranks - 1)) if way.kind == "gossip" else whole
    if not way.holds_back:
        return sum(
            graph.kept_bytes(p) // (2 if way.kind == "16 bits" and _is_float32(graph, p) else 1)
            for p in parameters
        )
    trained = [p for p in parameters if graph.nodes[p].name in graph.gradients]
    total, groups = 0, dict[str, list[list[tuple[int, ...]]]]()  # of runs, by the dtype they have
    for p in trained:
        if not _is_float32(graph, p):
            total += graph.kept_bytes(p)
            continue
        runs = groups.setdefault(graph.nodes[p].dtype, [[]])
        if p in shared:
            total += graph.kept_bytes(p)
            runs.append([])
        else:
            runs[-1].append(graph.nodes[p].shape)
    rows = [run for runs in groups.values() for run in runs if run]
    return total + sum(summed_as(way, run, sum(map(_aligned, run)), ranks) for run in rows)


def _aligned(shape: tuple[int, ...]) -> int:
    """Return the numbers of a gradient with those that are left free behind it."""
    return -(-math.prod(shape) // ALIGNED) * ALIGNED


def _is_float32(graph: Graph, parameter: int) -> bool:
    node = graph.nodes[parameter]
    return node.name in graph.masters or node.dtype == "float32"


def error_bound(bits: int) -> float:
    """Return the most by which a number may change, as a part of the greatest of its row."""
    return 0.5 / (2 ** (bits - 1) - 1)
