"""Known: the sizes of models that files name instead of describing.

Source:   the configuration that was published with each model.
"""

from dataclasses import replace

from penstock.errors import EstimateError
from penstock.estimate.transformer import Experts, Latent, Transformer, gpt


# positional, to be read as a table: hidden, blocks, heads, ...
def _llama(hidden: int, blocks: int, heads: int, feed_forward: int, keys: int = 8) -> Transformer:
    return Transformer(
        hidden, blocks, heads, 128256, 4096, feed_forward,
        key_heads=keys, gated=True, tied=False,
    )  # fmt: skip


def _mpt(hidden: int, blocks: int, heads: int) -> Transformer:
    return Transformer(
        hidden, blocks, heads, 50368, 2048, 4 * hidden, positions=2048, scores="flash 1"
    )


def _deepseek(
    hidden: int, blocks: int, vocabulary: int, wide: int, experts: Experts
) -> Transformer:
    return Transformer(
        hidden, blocks, 128, vocabulary, 4096, wide,
        head_size=128, gated=True, tied=False, latent=Latent(1536, 512, 64), experts=experts,
    )  # fmt: skip


_MIXTRAL = Transformer(
    4096, 32, 32, 32000, 4096, 14336,
    key_heads=8, gated=True, tied=False, experts=Experts(8, 2, 14336, 0, 0),
)  # fmt: skip

MODELS: dict[str, Transformer] = {
    "gpt3-175b": gpt(12288, 96, 96, sequence=2048, vocabulary=51200),
    "llama3-8b": _llama(4096, 32, 32, 14336),
    "llama3-70b": _llama(8192, 80, 64, 28672),
    "llama3-405b": _llama(16384, 126, 128, 53248, 16),  # the machines measured had 16 key heads
    "mixtral-8x7b": _MIXTRAL,
    # one dense block whatever the depth, as those who measured slices of it set it
    "deepseekv2": _deepseek(5120, 60, 102400, 12288, Experts(160, 6, 1536, 3072, 1)),
    "deepseekv3": _deepseek(7168, 61, 129280, 18432, Experts(256, 8, 2048, 2048, 1)),
    # as Megatron builds it: embeddings as wide as the blocks, not 512
    "opt-350": Transformer(1024, 24, 16, 50272, 2048, 4096, positions=2048, scores="eager"),
    "gpt-neo": Transformer(
        2560,
        32,
        20,
        50257,
        2048,
        10240,
        positions=2048,
        scores="eager in 32 bits",
        gate_bytes=36,  # its GELU is written in Python, eight operators
    ),
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 24, 16),
    "mpt-760m": _mpt(1536, 24, 12),
    "mpt-1b": _mpt(2048, 24, 16),
    "mpt-3b": _mpt(2560, 32, 20),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 48, 56),
    "mpt-70b": _mpt(8192, 80, 64),
}


def find_model(name: str, *, blocks: int = 0, sequence: int = 0) -> Transformer:
    """Return the model of this name; `blocks` and `sequence` other than 0 replace its own.

    Raises:   EstimateError: there is none.
    """
    model = MODELS.get(name.lower())
    if model is None:
        hint = f"known: {', '.join(sorted(MODELS))}"
        raise EstimateError(f"no model is called {name!r}", hint=hint)
    longer = sequence or model.sequence
    positions = longer if model.positions else 0
    return replace(model, blocks=blocks or model.blocks, sequence=longer, positions=positions)
