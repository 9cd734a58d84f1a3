"""The Graph as a noun: checks itself, prints itself, is saved and read back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import GraphError
from penstock.graph.graph import CutPoint, Graph
from tests.graph.tiny import GRAPH, NODES


def test_graph_that_is_saved_is_read_back(tmp_path: Path) -> None:
    GRAPH.save(tmp_path / "graph.json")
    assert Graph.load(tmp_path / "graph.json") == GRAPH


def test_str_says_digest_ops_and_flop() -> None:
    text = "4 ops (2 backward), 0.00 GFLOP, 1 cut points"
    assert str(GRAPH) == f"Graph {GRAPH.digest}: {text}"


def test_sums_are_over_all_nodes() -> None:
    assert (GRAPH.flop, GRAPH.parameter_bytes) == (49, 16)


def test_users_are_the_nodes_that_read() -> None:
    assert GRAPH.users == ((3,), (3, 6), (5,), (4,), (), (6,), ())


def test_effects_are_ops_that_are_not_pure() -> None:
    random = replace(NODES[3], effect="random")
    graph = replace(GRAPH, nodes=(*NODES[:3], random, *NODES[4:]))
    assert graph.effects() == (("mm", "random", "a"),)


def test_digest_is_of_nodes_key_loss_and_gradients_not_of_names_and_cut_points() -> None:
    renamed = (replace(NODES[0], module="c"), replace(NODES[1], name="v"), *NODES[2:])
    assert replace(GRAPH, nodes=renamed).digest == GRAPH.digest
    assert replace(GRAPH, cut_points=()).digest == GRAPH.digest
    others = [
        replace(GRAPH, key=("batch: float32[4, 2]",)),
        replace(GRAPH, loss=3),
        replace(GRAPH, gradients={"w": None}),
        replace(GRAPH, nodes=(replace(NODES[0], dtype="float64"), *NODES[1:])),
        replace(GRAPH, nodes=(*NODES[:6], replace(NODES[6], origin=4))),
    ]
    assert len({graph.digest for graph in (GRAPH, *others)}) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": 7}, "the loss is node 7 of 7"),
        ({"nodes": (replace(NODES[0], inputs=(0,)), *NODES[1:])}, r"node 0 \(w\) reads a later"),
        ({"nodes": (*NODES[:6], replace(NODES[6], inputs=(-1,)))}, "node 6"),
        ({"nodes": (replace(NODES[0], storage=1), *NODES[1:])}, "has storage 1 and origin -1"),
        ({"nodes": (*NODES[:6], replace(NODES[6], origin=6))}, "has storage 6 and origin 6"),
        ({"cut_points": (CutPoint("b", 4, 0), CutPoint("a", 3, 0))}, r"not in order: \[4, 3\]"),
        ({"cut_points": (CutPoint("b", 4, 0), CutPoint("a", 4, 0))}, r"not in order: \[4, 4\]"),
        ({"gradients": {"v": 6}}, "a gradient of v, and no such parameter"),
    ],
)
def test_graph_that_cannot_be_is_refused(change: dict, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        replace(GRAPH, **change)


def damaged(**change) -> str:
    return json.dumps({**GRAPH.to_json(), **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(GRAPH.to_json())[:-40], "is not readable JSON"),
        ("[1]", "holds a list, not an object"),
        ("{}", "is JSON, but no graph"),
        (damaged(nodes=[[1, 2]]), "is damaged"),
        (damaged(columns=["name"]), "is damaged"),
        (damaged(nodes=3), "is damaged"),
        (damaged(cut_points=[{"name": "a"}]), "is damaged"),
        (damaged(loss=99), "the loss is node 99"),
        (damaged(penstock="plan"), "is JSON, but no graph"),
    ],
)
def test_damaged_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(GraphError, match=message) as caught:
        Graph.load(path)
    assert str(path) in caught.value.message


def test_missing_file_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"nowhere\.json"):
        Graph.load(tmp_path / "nowhere.json")
