"""A traced job, a transformer described in the same sizes and one that `configure` takes: the same
seconds within 3 %, of a micro-batch and of a step but for what a framework does once in it.
"""

from itertools import repeat
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.cli.configure import op_by_op
from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.estimate import read
from penstock.estimate.constants import terms
from penstock.estimate.shipped import load
from penstock.estimate.traced import constants_on
from penstock.estimate.transformer import Transformer
from penstock.plan.plan import plan_by_hand
from penstock.search.search import evaluate

SHAPES = [  # gated, hidden, layers, heads, kv heads, intermediate, vocabulary, sequence, samples
    (True, 1024, 1, 8, 8, 2816, 32000, 1024, 4),
    (True, 1024, 1, 8, 2, 2816, 32000, 1024, 1),
    (True, 2048, 1, 16, 4, 5632, 1000, 1024, 2),
    (True, 4096, 1, 32, 8, 14336, 128256, 2048, 1),
    (True, 512, 2, 8, 8, 1408, 32000, 512, 8),
    (False, 768, 2, 12, 12, 3072, 50257, 1024, 4),
    (False, 1024, 2, 8, 8, 4096, 32000, 1024, 1),
    (False, 2048, 1, 16, 16, 8192, 1000, 2048, 1),
    (False, 1600, 1, 25, 25, 6400, 50257, 1024, 2),
    (False, 4096, 1, 32, 32, 16384, 50257, 2048, 1),
]
A100 = DeviceKind("a100-80", 80 << 30, (("float32", 19.5e12), ("bfloat16", 312e12)), 2.039e12)
HERE = Cluster((A100,), (Host("one", "a100-80", 8),), Link(5e-6, 300e9, 5e-6))


class Block(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.into, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x):
        parts = self.into(self.norms[0](x)).chunk(3, -1)
        split = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        seen = F.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Words(nn.Module):
    def __init__(self, hidden, layers, heads, inner, vocabulary, sequence):
        super().__init__()
        self.table, self.places = nn.Embedding(vocabulary, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.Sequential(*(Block(hidden, heads, inner) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.table(x) + self.places.weight)))


def _model(shape):
    gated, hidden, layers, heads, keys, inner, vocabulary, sequence, _ = shape
    if not gated:
        return Words(hidden, layers, heads, inner, vocabulary, sequence)
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=keys, intermediate_size=inner, vocab_size=vocabulary,
        max_position_embeddings=sequence, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _loss(model, batch):
    made = model(batch)
    logits = made if isinstance(made, torch.Tensor) else made.logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(3)
def test_traced_and_described_take_the_same_seconds(shape, tmp_path: Path):
    gated, hidden, layers, heads, keys, inner, vocabulary, sequence, samples = shape
    job = ps.Job(
        lambda: _model(shape),
        _loss,
        lambda _: repeat(torch.zeros(samples, sequence, dtype=torch.long)),
        lambda weights: torch.optim.AdamW(weights, lr=1e-4),
        precision="bfloat16",
        micro_batches=1,
    )
    graph = ps.trace(job, elsewhere=True)
    (profile,) = ps.estimate(graph, HERE)
    row = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": keys,
        "intermediate": inner, "gated": "yes" if gated else "no", "vocabulary": vocabulary,
        "tied": "no" if gated else "yes", "sequence": sequence, "micro_batch": samples,
        "attention": "masked" if gated else "flash", "device": "a100-80", "gpus": 1,
        "batch": samples, "framework": "penstock",
    }  # fmt: skip
    table = tmp_path / "run.csv"
    table.write_text(",".join(row) + "\n" + ",".join(map(str, row.values())) + "\n")
    (sample,) = read(table).samples
    constants = constants_on(A100, HERE, load())
    assert constants is not None
    made = terms("time", [sample.run])
    plan = plan_by_hand(graph, (), "one_f_one_b", num_micro_batches=1)
    traced, _ = evaluate(graph, profile, HERE, plan)
    described_s = float(made.of(constants.array)[0]) - constants.values["step"]
    assert traced.step_s == pytest.approx(described_s, rel=0.03)
    stage_s = float(made.stage_s(constants.array)[0])
    assert sum(profile.op_s) == pytest.approx(stage_s, rel=0.03)
    assert profile.basis.error > 2 * constants.spread
    assert op_by_op(as_configured(shape)) == sample.run.model


def as_configured(shape):
    """Return what `penstock configure` knows of such a model."""
    gated, hidden, layers, heads, keys, inner, vocabulary, sequence, _ = shape
    return Transformer(
        hidden, layers, heads, vocabulary, sequence, inner,
        key_heads=keys, gated=gated, tied=not gated,
    )  # fmt: skip
