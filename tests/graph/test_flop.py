"""FLOP against formulas worked out by hand."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.graph.trace import trace
from tests.graph.zoo import floats, job_of

B, T, D, H = 2, 8, 16, 4


def flop(model: nn.Module, *shape: int) -> Counter[tuple[str, str]]:
    """Return the FLOP of each kind of op and phase."""
    total: Counter[tuple[str, str]] = Counter()
    for node in trace(job_of(lambda: model, floats(*shape))).nodes:
        total[node.phase, node.target.split(".")[1] if node.target.count(".") else ""] += node.flop
    return total


def test_linear_has_two_per_product_and_twice_that_backward() -> None:
    found = flop(nn.Sequential(nn.Linear(D, 3 * D), nn.Linear(3 * D, D)), B, D)
    assert found["F", "addmm"] == 2 * (2 * B * D * 3 * D)
    assert found["B", "mm"] == 3 * (2 * B * D * 3 * D)  # the first layer's input has no gradient


def test_convolution_has_two_per_product_and_twice_that_backward() -> None:
    first, second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3, stride=2)
    found = flop(nn.Sequential(first, second), B, 3, 9, 9)
    one, two = 2 * B * 9 * 9 * 8 * 3 * 9, 2 * B * 4 * 4 * 4 * 8 * 9
    assert found["F", "convolution"] == one + two
    assert found["B", "convolution_backward"] == one + 2 * two


class Attention(nn.Module):
    def __init__(self, *, is_causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.is_causal = nn.Linear(D, 3 * D), is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(B, T, 3, H, D // H).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


def test_attention_has_two_products_forward_and_five_backward() -> None:
    found = flop(Attention(), B, T, D)
    product = 2 * B * H * T * T * (D // H)
    attention = {key: n for key, n in found.items() if "scaled_dot_product" in key[1]}
    assert sorted(attention.values()) == [2 * product, 5 * product]


def test_causal_attention_computes_the_pairs_that_see_each_other() -> None:
    found = flop(Attention(is_causal=True), B, T, D)
    product = 2 * B * H * (T * (T + 1) // 2) * (D // H)
    attention = {key: n for key, n in found.items() if "scaled_dot_product" in key[1]}
    assert sorted(attention.values()) == [2 * product, 5 * product]
    assert not any(n for (_, op), n in found.items() if op == "_unsafe_view")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(D, 2 * D)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def test_recurrent_layer_has_two_per_weight_and_position_and_twice_that_backward() -> None:
    found = flop(Recurrent(), T, B, D)
    weights = 4 * 2 * D * (D + 2 * D)
    assert found["F", "mkldnn_rnn_layer"] == 2 * T * B * weights
    assert found["B", "mkldnn_rnn_layer_backward"] == 4 * T * B * weights


@pytest.mark.parametrize("op", [torch.sin, torch.relu, lambda x: x * 2, lambda x: x.cumsum(0)])
def test_other_ops_have_one_per_element(op) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5))

        def forward(self, x: Tensor) -> Tensor:
            return op(self.weight) @ x

    nodes = trace(job_of(Model, floats(5, 2))).nodes
    first = next(node for node in nodes if node.kind == "op")
    assert first.flop == 15


def test_views_have_none() -> None:
    nodes = trace(job_of(lambda: nn.Linear(D, D), floats(B, T, D))).nodes
    views = [n for n in nodes if n.target in ("aten.view.default", "aten.t.default", "getitem")]
    assert views
    assert {node.flop for node in views} == {0}
