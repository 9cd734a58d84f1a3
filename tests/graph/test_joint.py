"""What of the weight gradients of several micro-batches is one product, and what runs apart."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.graph.cut import cut
from penstock.graph.graph import Graph
from penstock.graph.joint import Joint, joint_memory, joint_of
from penstock.graph.trace import capture
from penstock.job import Job

ROWS, WIDTH, COUNT = 3, 4, 5


class Squares(nn.Module):
    """A layer whose weights are squares: their gradient is no sum of products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.weight)


def joint(*layers: Callable[[], nn.Module], shape=(ROWS, WIDTH)) -> tuple[Graph, Joint, int]:
    """Return how the backward of one stage is run, and its most bytes."""
    job = Job(
        lambda: nn.Sequential(*(layer() for layer in layers)),
        lambda model, x: model(x).square().mean(),
        lambda start: (torch.ones(shape) for _ in itertools.count()),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    graph = capture(job).graph
    stages = cut(graph)
    stage = stages.stages[0]
    most = joint_memory(graph, stages, stage, count=COUNT, whole=False)
    return graph, joint_of(graph, stage.weight_gradient, COUNT), most


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def targets(graph: Graph, ops: tuple[int, ...]) -> list[str]:
    return [graph.nodes[op].target for op in ops]


@pytest.mark.parametrize("shape", [(ROWS, WIDTH), (2, ROWS, WIDTH)])
def test_every_product_for_a_weight_is_one_and_biases_are_added_up(shape):
    graph, found, _ = joint(linear, nn.Tanh, linear, shape=shape)
    once = [op for op in found.once.ops if graph.nodes[op].target == "aten.mm.default"]
    assert len(once) == 2 == len(found.along) // 2
    assert targets(graph, found.each.ops).count("aten.mm.default") == 1, "of the input of layer 2"
    assert [graph.nodes[p].name for p, _ in found.once.gradients] == ["0.weight", "2.weight"]
    assert [graph.nodes[p].name for p, _ in found.each.gradients] == ["0.bias", "2.bias"]
    assert all(dim == 0 for _, dim in found.along), "rows are below one another"
    assert found.once.times == COUNT


def test_a_gradient_that_is_more_than_a_product_runs_apart():
    graph, found, _ = joint(Squares, linear)
    assert [graph.nodes[p].name for p, _ in found.once.gradients] == ["1.weight"]
    assert {graph.nodes[p].name for p, _ in found.each.gradients} == {"0.weight", "1.bias"}
    assert "aten.mul.Tensor" in targets(graph, found.each.ops)


def test_convolutions_and_norms_run_apart():
    shape = (2, WIDTH, 5)
    _, found, most = joint(
        lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1), lambda: nn.LayerNorm(5), shape=shape
    )
    assert (found.along, found.once.ops) == ((), ())
    assert len(found.each.gradients) == 4
    assert most > 0


def test_most_bytes_are_the_operands_of_all_micro_batches_and_a_copy():
    """Beyond what F kept: gradients of both layers, and the longest copy or the results."""
    _, found, most = joint(linear, nn.Tanh, linear)
    operand = 4 * COUNT * ROWS * WIDTH
    assert len(found.along) == 4
    assert 2 * operand < most <= 4 * operand
