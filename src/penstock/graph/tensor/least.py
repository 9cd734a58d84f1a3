"""Least: seconds of a micro-batch below which no division of its ops among ranks is expected.

    seconds of all ops and updates / ranks  +  for each input of products: the least of
                                       a collect of that input, or of what they make of it
                                       what these products, and the updates of their weights,
                                       take more if every rank does them whole

A product by columns of its weight collects the gradient of its input, one by rows what it makes;
products that read the same input share one collect.  The first one needs none: nobody asks for the
gradient of the step's own input.

Ignores:  collects of anything else; that ops without a rule are done whole.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from penstock.graph.graph import Graph


def least_s(
    graph: Graph, op_s: Sequence[float], ranks: int, collect_s: Callable[[float], float]
) -> float:
    """Return the seconds of a micro-batch on each of `ranks` that divide its ops, at least.

    op_s:       of every node, where one rank does all; of a parameter, of its update.
    collect_s:  of a collect of so many bytes.
    """
    saved = 1 - 1 / ranks
    total = sum(op_s) / ranks
    own_s, sizes = _products(graph, op_s)
    for number, (source, seconds) in enumerate(own_s.items()):
        if number:
            total += min(saved * seconds, collect_s(sizes[source]))
    return total


def _products(graph: Graph, op_s: Sequence[float]) -> tuple[dict[int, float], dict[int, float]]:
    """Return by what they read, the seconds of products with weights, and the least bytes there.

    The seconds are also those of backward products, and of the weights.
    """
    nodes = graph.nodes
    of_weights = _of_weights(graph)
    source_of: dict[int, int] = {}
    sizes: dict[int, float] = {}
    for at, node in enumerate(nodes):
        if node.kind != "op" or node.phase != "F" or not node.flop:
            continue
        read = [nodes[k].storage for k in node.inputs if k not in of_weights]
        if read and len(read) < len(node.inputs):
            source = source_of[at] = read[0]
            own = float(min(nodes[source].size_bytes, node.size_bytes))
            sizes[source] = min(own, sizes.get(source, own))
            weights = (nodes[k].storage for k in node.inputs if k in of_weights)
            source_of.update((k, source) for k in weights if nodes[k].kind == "parameter")
    seconds = defaultdict[int, float](float)
    for at, node in enumerate(nodes):
        origin = at if node.phase == "F" else node.origin
        if origin in source_of:
            seconds[source_of[origin]] += op_s[at]
    return dict(sorted(seconds.items())), sizes


def _of_weights(graph: Graph) -> set[int]:
    """Return the values that are made of parameters and buffers alone."""
    found = set[int]()
    for at, node in enumerate(graph.nodes):
        is_held = node.kind in ("parameter", "buffer")
        if is_held or (node.kind == "op" and node.inputs and found.issuperset(node.inputs)):
            found.add(at)
    return found
