"""A described transformer is the model of the same shape: its FLOP and parameters, within 3 %."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from penstock.estimate.constants import terms
from penstock.estimate.datasheet import find_device
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.transformer import Transformer

SHAPES = [  # hidden, layers, heads, kv heads, intermediate, vocabulary, sequence, samples
    (256, 2, 4, 4, 704, 1000, 128, 1),
    (256, 2, 8, 2, 704, 1000, 512, 2),
    (512, 3, 8, 8, 1408, 32000, 128, 4),
    (512, 1, 4, 1, 2048, 5000, 1024, 1),
    (1024, 2, 16, 4, 2816, 32000, 256, 2),
    (1024, 4, 8, 8, 4096, 50257, 64, 8),
    (2048, 2, 16, 16, 5632, 32000, 2048, 1),
    (2048, 2, 32, 8, 8192, 128256, 512, 1),
    (4096, 1, 32, 8, 14336, 128256, 2048, 1),
    (768, 6, 12, 12, 2048, 8000, 1024, 2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flop_and_parameters_are_those_that_torch_counts(shape):
    hidden, blocks, heads, keys, inner, vocabulary, sequence, samples = shape
    config = transformers.LlamaConfig(
        hidden_size=hidden, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=keys, intermediate_size=inner, vocab_size=vocabulary,
        attn_implementation="eager", max_position_embeddings=sequence,
    )  # fmt: skip
    model = Transformer(
        hidden, blocks, heads, vocabulary, sequence, inner,
        key_heads=keys, gated=True, tied=False, scores="written",
    )  # fmt: skip
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.zeros(samples, sequence, dtype=torch.long)
        mask = torch.zeros(samples, 1, sequence, sequence)
        with FlopCounterMode(display=False) as counted:
            made = built(tokens, mask, tokens[:1], use_cache=False)  # places: none is read
            made.logits.sum().backward()
    device = find_device("a100-80")
    run = TrainingRun(model, "here", (blocks,), (device,), 1, 1, samples, 1)
    work = terms("time", [run])
    flop = sum(
        work.lanes[0, 0, work.names.index(name)] * device.peak_flop_per_s
        for name in ("products", "attention")
    )
    assert flop == pytest.approx(counted.get_total_flops(), rel=0.03)
    parameters = sum(p.numel() for p in built.parameters())
    assert model.parameters == pytest.approx(parameters, rel=0.03)
    assert model.flop_per_token * samples * sequence <= flop
