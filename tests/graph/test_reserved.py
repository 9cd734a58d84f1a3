"""What real kernels return beyond what fake ones say is part of the graph."""

import pytest
import torch
from torch import nn

from penstock.graph.trace import capture
from penstock.job import Job

WIDTH, TOKENS, SAMPLES = 8, 5, 3


def job_of(module: nn.Module) -> Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = module, nn.Linear(WIDTH, 1)

        def forward(self, x):
            y = self.inner(x)
            return self.head(y[0] if isinstance(y, tuple) else y)

    def data(start):
        while True:
            yield torch.ones(TOKENS, SAMPLES, WIDTH)

    return Job(Model, lambda model, x: model(x).square().mean(), data, torch.optim.Adam)


def test_workspace_of_a_fused_lstm_has_the_size_that_its_kernel_gives_it():
    graph = capture(job_of(nn.LSTM(WIDTH, WIDTH))).graph
    (op,) = (i for i, node in enumerate(graph.nodes) if "mkldnn_rnn_layer.d" in node.target)
    *_, workspace = (node for node in graph.nodes if node.inputs == (op,))
    x, zeros = torch.ones(TOKENS, SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)
    w, b = torch.ones(4 * WIDTH, WIDTH), torch.zeros(4 * WIDTH)
    sizes = [], 2, WIDTH, 1, True, False, False, True
    x.requires_grad_()
    real = torch.ops.aten.mkldnn_rnn_layer(x, w, w, b, b, zeros, zeros, False, *sizes)[3]
    assert real.numel() > 0
    assert workspace.size_bytes == real.numel() * real.element_size()
    assert workspace.shape == (0,)


def test_graph_of_a_model_without_such_ops_runs_none(monkeypatch):
    from penstock.graph import reserved

    monkeypatch.setattr(reserved, "_measured", lambda node: pytest.fail(f"{node} is run"))
    graph = capture(job_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)))).graph
    assert all(node.size_bytes for node in graph.nodes if node.shape and node.kind == "op")


def test_empty_parameter_is_no_workspace():
    class Empty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.none = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return super().forward(x) + self.none.sum()

    job = job_of(Empty())
    assert "inner.none" in capture(job).graph.gradients
