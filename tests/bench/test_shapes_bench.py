"""bench.shapes: all ways compute the same of the same texts."""

import pytest
import torch

from bench import shapes as bench

transformers = pytest.importorskip("transformers")


def test_a_batch_of_any_collator_has_the_loss_of_its_texts():
    torch.manual_seed(0)
    model, samples = bench.Gpt().double(), bench.texts(3)
    flat = transformers.DataCollatorWithFlattening(return_seq_idx=True)
    batches = [bench.longest(transformers, samples), bench.flattened(flat, samples)]
    (packed,) = [
        way for way in bench.ways(bench.texts(40)) if (way.name, way.by) == ("packed", "loop")
    ]
    losses = [float(bench.loss_of(model, batch).detach()) for batch in batches]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert bench.sizes_of(packed, 1)[1] == bench.PLACES
