"""Huge: which parameters are so much larger than blocks that slices of them may pay."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.graph.graph import Graph
from penstock.graph.split import split
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.search.huge import huge, words_of
from tests.search.chains import chain


def job_of(rows: int, blocks: int = 2) -> Job:
    def make() -> nn.Module:
        layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8))] * blocks
        return nn.Sequential(nn.Embedding(rows, 8), *layers, nn.Linear(8, rows, bias=False))

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    def data(start: int):
        while True:
            yield torch.zeros(1, 4, dtype=torch.int64)

    return Job(model=make, loss=loss, data=data, optimizer=torch.optim.SGD, micro_batches=1)


def test_embedding_and_head_are_huge_where_they_have_more_than_a_block() -> None:
    block = 4 * (2 * 8 + 2 * 8 * 16 + 16 + 8)
    rows = block // 32
    assert huge(capture(job_of(rows)).graph) == {}
    more = capture(job_of(rows + 2))
    assert huge(more.graph) == {"0.weight": 32 * (rows + 2), "3.weight": 32 * (rows + 2)}
    assert huge(split(more, {"0.weight": 2}).graph) == {}


@given(st.lists(st.integers(1, 100), min_size=2, max_size=6))
def test_layers_of_one_size_are_never_huge(weights: list[int]) -> None:
    """Only what is more than twice, and more than all of any other block of half the size."""
    graph = _owned(chain(weights, [10] * len(weights)))
    found = huge(graph)
    for name, size in found.items():
        others = [n.size_bytes for n in graph.nodes if n.kind == "parameter" and n.name != name]
        assert any(2 * other < size for other in others)
    if max(weights) < 2 * min(weights):
        assert found == {}


def _owned(graph: Graph) -> Graph:
    from dataclasses import replace

    named = [
        replace(n, name=f"layers.{n.name[1:]}.weight", shape=(8, 2)) if n.kind == "parameter" else n
        for n in graph.nodes
    ]
    gradients = {f"layers.{name[1:]}.weight": at for name, at in graph.gradients.items()}
    return replace(graph, nodes=tuple(named), gradients=gradients)


def test_words_name_what_is_huge_and_how_it_is_cut() -> None:
    assert words_of({"a": 4, "a.bias": 4}, {"a": 2**20}) == "a (1.00 MiB) in 4"
