"""Where a model can be divided, what may be repeated, and which op belongs to which stage."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.graph.cut import cut
from penstock.graph.cut_points import find_cut_points
from penstock.graph.graph import Graph
from penstock.graph.trace import trace
from tests.graph.zoo import JOBS, D, floats, job_of

traced = functools.cache(lambda name: trace(JOBS[name]))


class Chain(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        pairs = itertools.pairwise(widths)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairs)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain(*widths: int) -> Graph:
    return trace(job_of(lambda: Chain(*widths), floats(4, widths[0])))


def test_cut_points_stand_where_modules_end_and_are_named_after_them() -> None:
    points = chain(8, 8, 8, 8).cut_points
    assert [point.name for point in points] == ["after layers.0.0", "after layers.1.0"]
    assert [point.forward_bytes for point in points] == [4 * 4 * 8] * 2


@pytest.mark.parametrize(
    ("widths", "kept"),
    [
        ((16, 8, 16, 16), [8, 16]),  # wider at the end
        ((16, 32, 8, 16), [32, 8]),  # narrower
        ((16, 8, 32, 8, 16), [8, 8]),  # a wide place between two narrow ones is left out
    ],
)
def test_places_where_more_crosses_than_on_both_sides_are_left_out(widths, kept) -> None:
    found = [point.forward_bytes for point in chain(*widths).cut_points]
    assert found == [4 * 4 * width for width in kept]


def test_a_cut_has_a_product_before_and_after_it() -> None:
    for name in JOBS:
        graph = traced(name)
        heavy = [i for i, n in enumerate(graph.nodes) if n.phase == "F" and n.flop > 1000]
        for point in graph.cut_points:
            assert min(heavy, default=0) < point.at
        assert len({point.name for point in graph.cut_points}) == len(graph.cut_points)


def test_finding_again_finds_the_same() -> None:
    graph = traced("unet")
    assert find_cut_points(graph) == graph.cut_points


def free_targets(forward: Callable[[nn.Module, Tensor], Tensor]) -> set[str]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)
            self.register_buffer("fixed", torch.ones(D))
            self.register_buffer("changed", torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(forward(self, x))

    graph = trace(job_of(Model, floats(4, D)))
    rows = zip(graph.nodes, graph.free, strict=True)
    return {node.target for node, free in rows if free and node.kind == "op" and node.phase == "F"}


def changes_a_buffer(model: nn.Module, x: Tensor) -> Tensor:
    y = x * model.changed.cos()
    model.changed.add_(1)
    return y


@pytest.mark.parametrize(
    ("forward", "target", "free"),
    [
        (lambda model, x: x.sin(), "aten.sin.default", True),
        (lambda model, x: x * model.fixed.cos(), "aten.cos.default", True),
        (lambda model, x: x * model.linear.weight.t()[0], "aten.select.int", True),
        (lambda model, x: x + torch.arange(D), "aten.arange.default", True),
        (changes_a_buffer, "aten.cos.default", False),
        (lambda model, x: x + torch.rand(D), "aten.rand.default", False),
        (lambda model, x: x @ torch.ones(D, D), "aten.mm.default", False),
        (lambda model, x: x * model.linear.bias.cos(), "aten.cos.default", True),
        (lambda model, x: (x * model.linear.bias).cos(), "aten.cos.default", False),
    ],
)
def test_what_every_stage_may_compute_for_itself(forward, target: str, free: bool) -> None:
    assert (target in free_targets(forward)) == free


def test_masks_are_repeated_where_they_are_read_and_do_not_cross() -> None:
    graph = traced("embeddings")
    stages = cut(graph, range(len(graph.cut_points)))
    crossing = {graph.nodes[v].dtype for edge in stages.edges for v in edge.values}
    assert crossing == {"float32"}
    repeated = [op for s in stages.stages for op in s.forward.ops]
    masks = [i for i in set(repeated) if graph.nodes[i].target == "aten.ne.Scalar"]
    assert [repeated.count(mask) > 1 for mask in masks] == [True]


def test_views_of_weights_are_made_again_in_the_backward_pass() -> None:
    graph = traced("blocks")
    (stage,) = cut(graph).stages
    kept = [graph.nodes[graph.nodes[v].storage].kind for v in stage.forward.keeps]
    assert set(kept) <= {"op", "input"}


def test_buffers_that_a_step_writes_are_known() -> None:
    graph = traced("batch_norm")
    names = {graph.nodes[i].name.rpartition(".")[2] for i in graph.written}
    assert names == {"running_mean", "running_var", "num_batches_tracked"}
    assert traced("batch_norm_eval").written == set()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.rnn = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


def test_recurrent_model_is_cut_before_its_head() -> None:
    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    job = replace(
        job_of(Recurrent, floats(2, 3)),
        loss=loss,
        data=lambda start: iter([torch.ones(2, 5).long()]),
    )
    assert [point.name for point in trace(job).cut_points] == ["after rnn"]
