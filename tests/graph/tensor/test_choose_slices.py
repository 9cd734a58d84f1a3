"""What is sliced is the cheapest of all that could be; a GPT gets Megatron's pairs."""

import itertools

import pytest
from torch import nn

from penstock.graph.tensor.choose_slices import chosen, groups_of, held_by
from penstock.graph.tensor.placed import Placing, RankSpeed
from penstock.graph.tensor.value_placement import PARTIAL, WHOLE, Slices
from penstock.graph.trace import capture
from tests.graph.zoo import JOBS, floats, job_of


def net(*widths):
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    rows = [each for layer in layers for each in (layer, nn.ReLU())]
    return lambda: nn.Sequential(*rows[:-1])


@pytest.mark.parametrize(
    "job",
    [
        job_of(net(64, 256, 64), floats(16, 64)),
        job_of(net(32, 8, 64, 32), floats(64, 32)),
        job_of(net(128, 128, 128, 128), floats(8, 128)),
        JOBS["blocks"],
        JOBS["unet"],
    ],
)
@pytest.mark.parametrize("latency_s", [0.0, 1e-6])
def test_the_choice_is_the_best_of_all(job, latency_s):
    placing = Placing(capture(job), 2, RankSpeed(latency_s=latency_s))
    groups = groups_of(placing)
    picked = chosen(placing, groups)
    ways = itertools.product(*(group.options for group in groups))
    best = min(placing.layout(held_by(groups, way)).seconds for way in ways if any(way))
    assert placing.layout(held_by(groups, picked)).seconds == pytest.approx(best)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.norm, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        B, T, D = x.shape
        qkv = self.qkv(self.norm(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def test_a_transformer_is_divided_by_columns_then_rows():
    job = job_of(lambda: nn.Sequential(Block(128, 4), Block(128, 4)), floats(4, 64, 128))
    placing = Placing(capture(job), 2, RankSpeed())
    groups = groups_of(placing)
    layout = placing.layout(held_by(groups, chosen(placing, groups)))
    for block in "01":
        assert layout.held[f"{block}.qkv.weight"] == Slices(0, 3), "by heads, in each of its runs"
        assert layout.held[f"{block}.qkv.bias"] == Slices(0, 3)
        assert layout.held[f"{block}.mix.weight"] == Slices(1)
        assert layout.held[f"{block}.up.weight"] == Slices(0)
        assert layout.held[f"{block}.down.weight"] == Slices(1)
        assert f"{block}.mix.bias" not in layout.held
    forward = sum(choice.several is not None for choice in layout.choices.values())
    assert forward == 4, "a sum behind each pair"
    assert [place for _, place in layout.collects] == [WHOLE] * 4, "and back"
    assert PARTIAL in layout.states.values()
