"""Huge: the parameters that are larger than any block of the model, for which slices may pay."""

from collections import defaultdict

from penstock.graph.cut_points import block_of
from penstock.graph.graph import Graph
from penstock.units import format_bytes

COUNTS = 2, 4, 8  # slices that are tried, one after the other, while that helps


def huge(graph: Graph) -> dict[str, int]:
    """Return the bytes of each parameter with rows that has more than any block has of smaller
    ones, by name, the largest first; a graph that has slices has none.

    A block is as `block_of` says; outside of blocks, a module.
    """
    kept: dict[str, int] = {}
    sizes: list[tuple[int, str]] = []
    for at, node in enumerate(graph.nodes):
        if node.kind == "parameter":
            kept[node.name] = graph.kept_bytes(at)
            sizes += [(kept[node.name], node.name)] if len(node.shape) > 1 else []
    found: dict[str, int] = {}
    for size, name in sorted(sizes, reverse=True) if not graph.slices else ():
        blocks: defaultdict[str, int] = defaultdict(int)
        for other, held in kept.items():
            owner = other.rpartition(".")[0]
            blocks[block_of(owner) or owner] += held if held < size else 0
        if size <= max(blocks.values()):
            break
        found[name] = size
    return found


def words_of(slices: dict[str, int], sizes: dict[str, int]) -> str:
    """Return which parameters are in how many slices, in words."""
    rows = (f"{n} ({format_bytes(sizes[n])}) in {k}" for n, k in slices.items() if n in sizes)
    return ", ".join(rows)
