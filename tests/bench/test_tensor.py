"""The bench of ops divided among ranks: both sides train the same, and the peer is divided."""

import torch
from torch import nn

from bench.tensor import MODELS, by_hand, job_of
from penstock.graph.trace import build_model


def test_the_peer_divides_pairs_of_layers_by_columns_and_rows():
    pairs = {"gpt": (32, 16), "vgg": (1, 1), "moe": (12, 4)}  # of which layers in columns, in rows
    assert pairs.keys() == {*MODELS}
    for name, (columns, rows) in pairs.items():
        model = build_model(job_of(name))
        styles = by_hand(model)
        modules = dict(model.named_modules())
        assert all(isinstance(modules[each], nn.Linear) for each in styles)
        kinds = [type(style).__name__ for style in styles.values()]
        assert (kinds.count("ColwiseParallel"), kinds.count("RowwiseParallel")) == (columns, rows)


def test_a_micro_batch_is_always_the_same():
    for name in MODELS:
        job = job_of(name)
        first, again = next(job.data(3)), next(job.data(3))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
