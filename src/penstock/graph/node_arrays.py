"""NodeArrays: what the nodes of a graph read, lie in and hold, as arrays."""

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a graph makes them itself, so its file imports this one
    from penstock.graph.graph import Graph

Ints: TypeAlias = NDArray[np.int64]


class NodeArrays(NamedTuple):
    """Of all nodes of a graph, one after the other.

    values      each node and what it reads, as `Graph.reads`
    first       where those of a node begin; one more at the end
    storage     as that of a node
    made_bytes  as `Graph.made_bytes`
    """

    values: Ints
    first: Ints
    storage: Ints
    made_bytes: Ints

    def read_by(self, ops: Ints) -> tuple[Ints, Ints]:
        """Return `ops`, each with what it reads behind it, and for each its place in `ops`."""
        counts = self.first[ops + 1] - self.first[ops]
        ends = np.cumsum(counts)
        places = np.repeat(np.arange(len(ops)), counts)
        steps = np.arange(int(ends[-1]) if len(ends) else 0)
        return self.values[steps + (self.first[ops] - ends + counts)[places]], places


def node_arrays(graph: "Graph") -> NodeArrays:
    """Return the arrays of a graph."""
    counts = [len(row) for row in graph.reads]
    return NodeArrays(
        np.array([value for row in graph.reads for value in row], np.int64),
        np.cumsum([0, *counts], dtype=np.int64),
        np.array([node.storage for node in graph.nodes], np.int64),
        np.array(graph.made_bytes, np.int64),
    )
