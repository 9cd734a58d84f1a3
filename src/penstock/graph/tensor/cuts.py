"""Cuts: where a divided step must be cut, so that each collect lies between two stages.

What a collect reads is made in another stage than what it makes: a forward one begins its stage; a
backward one belongs to the op before the first whose gradients it reads, and a cut is between.
"""

from collections.abc import Sequence
from typing import Literal

from penstock.graph.graph import COLLECT_TARGET, Graph, Node
from penstock.graph.stages import StageEdge

CollectHow = Literal["sum", "gather", "scatter", "exchange"]
LOG_SUM_EXP = "penstock.log_sum_exp.default"  # of logits of which each rank has some
OWN_ROWS = "penstock.own_rows_mm.default"  # of experts of which each rank has some


def collects_in(nodes: Sequence[Node]) -> list[int]:
    """Return the collects of a step, as nodes."""
    return [at for at, node in enumerate(nodes) if node.target == COLLECT_TARGET]


def places_of(nodes: Sequence[Node], free: Sequence[bool]) -> list[int]:
    """Return for each node the forward op in whose stage it is, wherever the step is cut.

    len(nodes): in the last stage.
    """
    places = list(range(len(nodes)))
    for at, node in enumerate(nodes):
        if node.target == "getitem":
            places[at] = places[node.inputs[0]]
        elif node.phase == "B":
            origin = places[node.origin] if node.origin >= 0 else len(nodes)
            made = (places[k] for k in node.inputs if nodes[k].phase == "B" and not free[k])
            places[at] = min([origin, *made])
    return places


def needed_cuts(graph: Graph) -> tuple[int, ...]:
    """Return the nodes before which a divided step must be cut, in order."""
    nodes = graph.nodes
    collects = collects_in(nodes) if graph.tensor > 1 else []
    if not collects:
        return ()
    places = places_of(nodes, graph.free)
    cuts = (at if nodes[at].phase == "F" else places[nodes[at].inputs[0]] for at in collects)
    return tuple(sorted(set(cuts)))


def collect_points(graph: Graph) -> tuple[int, ...]:
    """Return the cut points at which a divided step must be cut, as indices."""
    number = {cut.at: k for k, cut in enumerate(graph.cut_points)}
    return tuple(number[at] for at in needed_cuts(graph))


def apart_only(graph: Graph) -> frozenset[int]:
    """Return the cut points at which what a collect reads would be on another rank than it."""
    nodes = graph.nodes
    if graph.tensor == 1 or not (collects := collects_in(nodes)):
        return frozenset()
    places = places_of(nodes, graph.free)
    spans: list[tuple[int, int]] = []
    for at in collects:
        pair = places[at], places[nodes[at].inputs[0]]
        spans.append((min(pair), max(pair)))
    rows = enumerate(graph.cut_points)
    return frozenset(k for k, cut in rows if any(a < cut.at <= b for a, b in spans))


def collects_of(graph: Graph, edge: StageEdge) -> dict[CollectHow, int]:
    """Return by kind of collect the bytes of an edge's values that each rank has made."""
    nodes, found = graph.nodes, dict[CollectHow, int]()
    for value in edge.values:
        readers = [user for user in graph.users[value] if nodes[user].target == COLLECT_TARGET]
        for reader in readers[:1]:
            how = how_of(nodes, reader)
            found[how] = found.get(how, 0) + nodes[value].size_bytes
    return found


def how_of(nodes: Sequence[Node], collect: int) -> CollectHow:
    """Return the kind of a collect: a gather gives one dim more, an exchange two, a scatter one
    less.
    """
    (value,) = nodes[collect].inputs
    more: dict[int, CollectHow] = {0: "sum", 1: "gather", 2: "exchange", -1: "scatter"}
    return more[len(nodes[collect].shape) - len(nodes[value].shape)]
