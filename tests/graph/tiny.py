"""Tiny: a graph small enough to count by hand: mean(x @ w), and the gradient of w."""

from penstock.graph.graph import CutPoint, Graph, Node

NODES = (
    Node("w", "parameter", "", (), (2, 2), "float32", 16, 0),
    Node("batch.0", "input", "", (), (3, 2), "float32", 24, 1),
    Node("scale", "scale", "", (), (), "float32", 4, 2),
    Node("mm", "op", "aten.mm.default", (1, 0), (3, 2), "float32", 24, 3, flop=24, module="a"),
    Node("mean", "op", "aten.mean.default", (3,), (), "float32", 4, 4, flop=1, module="b"),
    Node("expand", "op", "aten.expand.default", (2,), (3, 2), "float32", 24, 2, "B", 4),
    Node("mm_1", "op", "aten.mm.default", (1, 5), (2, 2), "float32", 16, 6, "B", 3, 24),
)
GRAPH = Graph(
    key=("batch: float32[3, 2]",),
    nodes=NODES,
    loss=4,
    gradients={"w": 6},
    cut_points=(CutPoint("after a", 4, 24),),
    samples=3,
    tokens=0,
)
