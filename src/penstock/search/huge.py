"""Huge: the parameters that are larger than any block of the model, for which slices may pay."""

from collections import defaultdict

from penstock.graph.cut_points import block_of, heavy_ops
from penstock.graph.graph import Graph
from penstock.units import format_bytes

COUNTS = 2, 4, 8  # slices that are tried, one after the other, while that helps


def huge(graph: Graph) -> dict[str, int]:
    """Return the bytes of each parameter with rows that has more than any other block of the model,
    by name, the largest first; of a graph that has slices already, none.

    A block is as `block_of` says, or else a module, and multiplies matrices; one that has a
    parameter of half the size, or more, is no other one.
    """
    totals, largest = defaultdict[str, int](int), defaultdict[str, int](int)
    sizes: list[tuple[int, str]] = []
    for at, node in enumerate(graph.nodes):
        if node.kind == "parameter":
            size, block = graph.kept_bytes(at), _block(node.name.rpartition(".")[0])
            totals[block] += size
            largest[block] = max(size, largest[block])
            sizes += [(size, node.name)] if len(node.shape) > 1 and not graph.slices else []
    working = {_block(graph.nodes[op].module) for op in heavy_ops(graph)}
    found: dict[str, int] = {}
    for size, name in sorted(sizes, reverse=True):
        others = [totals[block] for block in working if largest[block] < size / 2]
        found |= {name: size} if 0 < max(others, default=size) < size else {}
    return found


def _block(module: str) -> str:
    return block_of(module) or module


def words_of(slices: dict[str, int], sizes: dict[str, int]) -> str:
    """Return which parameters are in how many slices, in words."""
    rows = (f"{n} ({format_bytes(sizes[n])}) in {k}" for n, k in slices.items() if n in sizes)
    return ", ".join(rows)
