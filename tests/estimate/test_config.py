"""estimate.config: sizes are those of the model that transformers builds from the same file."""

import json

import pytest
import torch
import transformers

from penstock.errors import EstimateError
from penstock.estimate.config import read_model

SMALL = {"vocab_size": 1000, "tie_word_embeddings": False}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 700,
    "max_position_embeddings": 128,
    **SMALL,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "n_inner": None,
    "vocab_size": 1000,
}
OPT = {
    **{key: LLAMA[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    "model_type": "opt",
    "max_position_embeddings": 126,  # and two that it adds
    "ffn_dim": 512,
    "word_embed_proj_dim": 256,
    "vocab_size": 1000,
}
NEOX = {**LLAMA, "model_type": "gpt_neox"}
del NEOX["num_key_value_heads"]
CASES = [
    LLAMA,
    {**LLAMA, "tie_word_embeddings": True},
    {**LLAMA, "model_type": "mistral", "head_dim": 64},
    {**LLAMA, "model_type": "qwen2"},
    {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    GPT2,
    OPT,
    NEOX,
]


@pytest.fixture
def saved(tmp_path):
    def save(content):
        path = tmp_path / "config.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return save


@pytest.mark.parametrize("content", CASES, ids=lambda case: case["model_type"])
def test_parameters_are_those_of_the_model_itself(saved, content):
    path = saved(content)
    config = transformers.AutoConfig.from_pretrained(path.parent)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    matrices = sum(p.numel() for p in built.parameters() if p.ndim > 1)
    found = read_model(path).parameters
    assert found == pytest.approx(matrices, abs=2 * 256)  # opt: two positions
    assert read_model(path, sequence=32).sequence == 32


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not readable JSON"),
        ({**LLAMA, "model_type": "mamba"}, "has model_type 'mamba'"),
        ({**LLAMA, "model_type": ["llama"]}, "has model_type"),
        (
            {key: value for key, value in LLAMA.items() if key != "hidden_size"},
            "has no hidden_size",
        ),
        ({**LLAMA, "num_hidden_layers": 2.5}, "num_hidden_layers is 2.5, not a whole number"),
        ({**LLAMA, "vocab_size": 10**400}, "vocab_size is a huge number, not a whole number"),
        ({**LLAMA, "hidden_size": True}, "hidden_size is True"),
        ({**LLAMA, "tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', not true or false"),
        ({**LLAMA, "num_attention_heads": 7}, "hidden size 256 is not divisible by 7 heads"),
    ],
)
def test_what_is_no_language_model_is_refused(saved, content, words):
    with pytest.raises(EstimateError, match=words):
        read_model(saved(content))


def test_more_tokens_than_learned_positions_are_refused(saved):
    with pytest.raises(EstimateError, match=r"65 tokens, and .* has 64 learned positions"):
        read_model(saved(GPT2), sequence=65)
    assert read_model(saved(LLAMA), sequence=4096).sequence == 4096
