"""Of rank: a divided step as one of its ranks has it; they differ in the names of their slices."""

from dataclasses import replace
from math import prod

from penstock.graph.parts import part_in, part_key
from penstock.graph.trace import Capture


def of_rank(capture: Capture, rank: int) -> Capture:
    """Return a divided step as the rank with this number of the tensor axis has it."""
    names = {n.name: _name_of(n.name, rank) for n in capture.graph.nodes if n.kind == "parameter"}
    graph = capture.graph
    nodes = tuple(replace(n, name=names.get(n.name, n.name)) for n in graph.nodes)
    gradients = {names[name]: node for name, node in graph.gradients.items()}
    masters = {names[name]: size for name, size in graph.masters.items()}
    return replace(
        capture, rank=rank, graph=replace(graph, nodes=nodes, gradients=gradients, masters=masters)
    )


def _name_of(name: str, rank: int) -> str:
    part = part_in(name)
    if part is None:
        return name
    start = rank * prod(part.shape) // part.ranks
    return part_key(part.key, start, part.shape, part.order)
