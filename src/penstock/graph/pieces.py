"""Pieces: the ops between neighbouring cut points, and the modules that work in each.

A piece is the least that a stage can be.  It belongs to the modules of its `heavy_ops`, or of all
its ops if it has none of these: lighter ones, like norms and sums, go where their neighbours go.
"""

import bisect
import itertools

from penstock.graph.cut_points import heavy_ops
from penstock.graph.graph import Graph
from penstock.graph.parts import key_in


def modules_by_piece(graph: Graph) -> tuple[frozenset[str], ...]:
    """Return for each piece the paths of the modules that work in it."""
    places = [point.at for point in graph.cut_points]
    forward = [at for at, node in enumerate(graph.nodes) if node.kind == "op" and node.phase == "F"]
    heavy, found = set(heavy_ops(graph)), list[frozenset[str]]()
    for a, b in itertools.pairwise([0, *places, len(graph.nodes)]):
        ops = forward[bisect.bisect_left(forward, a) : bisect.bisect_left(forward, b)]
        working = [at for at in ops if at in heavy] or ops
        found.append(frozenset(graph.nodes[at].module for at in working))
    return tuple(found)


def owners_by_piece(graph: Graph) -> tuple[frozenset[str], ...]:
    """Return for each piece the paths of the modules whose parameters its forward ops read."""
    places, free = [point.at for point in graph.cut_points], graph.free
    held: list[set[str]] = [set() for _ in range(len(places) + 1)]
    reads: list[frozenset[str]] = []  # of each node, the owners of what it is a view of
    for at, node in enumerate(graph.nodes):
        given = frozenset(owner for source in node.inputs for owner in reads[source])
        if node.kind == "parameter":
            given = frozenset([key_in(node.name).rpartition(".")[0]])
        elif node.kind == "op" and node.phase == "F" and not free[at]:
            held[bisect.bisect_right(places, at)] |= given
        reads.append(given if node.kind == "parameter" or free[at] else frozenset())
    return tuple(map(frozenset, held))


def modules_of(graph: Graph) -> tuple[str, ...]:
    """Return the paths of all modules in which an op of the forward pass is computed, outer first.

    They stand in the order of their first op.
    """
    paths: dict[str, None] = {}
    for node in graph.nodes:
        if node.kind == "op" and node.phase == "F" and node.module:
            paths |= dict.fromkeys(outer(node.module))
    return tuple(paths)


def outer(path: str) -> tuple[str, ...]:
    """Return the paths of the modules that hold one, the outermost first, and its own last."""
    parts = path.split(".") if path else []
    return tuple(".".join(parts[: k + 1]) for k in range(len(parts)))


def ends_of(graph: Graph, module: str) -> tuple[int, ...]:
    """Return the cut points between the last of several `heavy_ops` of a module and one of others.

    Lighter ops between the two may stand on either side of it.
    """
    heavy, found = heavy_ops(graph), list[int]()
    for number, point in enumerate(graph.cut_points):
        place = bisect.bisect_left(heavy, point.at)
        before, after = heavy[:place][-1:], heavy[place:][:1]
        inside = [is_inside(graph.nodes[at].module, module) for at in before + after]
        found += [number] if inside == [True, False] else []
    return tuple(found)


def is_inside(path: str, module: str) -> bool:
    """Return whether a path is that of `module`, or of one that it holds."""
    return path == module or path.startswith(f"{module}.")
