"""Weights that autocast only casts are read in 16 bits (parity: tests/parity/test_precision.py)."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.graph.trace import capture
from tests.graph.zoo import JOBS, job_of, vectors

WIDTH = 16


class Mixed(nn.Module):
    """What autocast reads in 16 bits, in 32, in both, and what has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.both, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.both(self.norm(self.first(x))))
        return x.float() + self.both.weight.square().sum()


def test_weights_that_are_only_cast_are_read_in_16_bits() -> None:
    job = job_of(Mixed, vectors, autocast="bfloat16")
    graph = capture(job).graph
    narrow = {"first.weight", "first.bias", "both.bias", "frozen.weight", "frozen.bias"}
    assert graph.masters.keys() == narrow
    for node in graph.nodes:
        if node.kind == "parameter":
            assert node.dtype == ("bfloat16" if node.name in narrow else "float32")
            assert graph.kept_bytes(graph.nodes.index(node)) == 4 * torch.Size(node.shape).numel()
    plain = capture(replace(job, autocast=None)).graph
    assert plain.masters == {}


@pytest.mark.parametrize("name", ["autocast", "autocast_tied"])
def test_no_micro_batch_casts_them(name: str) -> None:
    graph = capture(JOBS[name]).graph
    parameters = {at for at, node in enumerate(graph.nodes) if node.kind == "parameter"}
    casts = [node for node in graph.nodes if node.target == "aten._to_copy.default"]
    assert graph.masters
    narrow = {at for at in parameters if graph.nodes[at].name in graph.masters}
    assert not any(narrow & {*node.inputs} for node in casts)
