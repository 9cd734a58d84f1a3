"""Config: the sizes of a transformer from the config.json that Hugging Face keeps with a model."""

from pathlib import Path
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta

from penstock.errors import EstimateError
from penstock.estimate.transformer import Transformer
from penstock.files import read_json
from penstock.typed import damage, typed


class _Family(NamedTuple):
    """What a `model_type` implies without saying so."""

    gated: bool
    tied: bool  # where the file does not say
    learned_positions: bool


_FAMILIES = {
    "gpt2": _Family(gated=False, tied=True, learned_positions=True),
    "opt": _Family(gated=False, tied=True, learned_positions=True),
    "gpt_neox": _Family(gated=False, tied=False, learned_positions=False),
    "llama": _Family(gated=True, tied=False, learned_positions=False),
    "mistral": _Family(gated=True, tied=False, learned_positions=False),
    "qwen2": _Family(gated=True, tied=False, learned_positions=False),
    "qwen3": _Family(gated=True, tied=False, learned_positions=False),
}
_NAMES = {  # ours, and what files call it
    "hidden": ("hidden_size", "n_embd"),
    "blocks": ("num_hidden_layers", "n_layer"),
    "heads": ("num_attention_heads", "n_head"),
    "vocabulary": ("vocab_size",),
    "positions": ("max_position_embeddings", "n_positions"),
    "feed_forward": ("intermediate_size", "ffn_dim", "n_inner"),
    "key_heads": ("num_key_value_heads",),
    "head_size": ("head_dim",),
}
_TIED = "tie_word_embeddings"
_Size: TypeAlias = Annotated[
    int, Meta(ge=1, lt=2**31, description="a whole number from 1 to 2 ** 31")
]


def read_model(path: Path | str, *, sequence: int = 0) -> Transformer:
    """Return the sizes in a config.json; `sequence` 0 takes as many tokens as it has positions.

    Ignores:  biases, sliding windows, dropout.
    Raises:   EstimateError: not readable, a family that is not known here, a size that is missing,
              no whole number or cannot be; more tokens than learned positions.
    """
    content = read_json(path, EstimateError, "config")
    kind = content.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        hint = f"known: {', '.join(_FAMILIES)}; or give the name of a model"
        raise EstimateError(f"{path} has model_type {kind!r}", hint=hint)
    with damage(str(path), EstimateError, hint="is this the config.json of a model?"):
        known = {key: content.get(key) for keys in _NAMES.values() for key in keys}
        given = typed(dict[str, _Size | None], known)
        tied = typed(dict[str, bool | None], {_TIED: content.get(_TIED)})[_TIED]
    sizes = {name: next(filter(None, map(given.get, keys)), 0) for name, keys in _NAMES.items()}
    for name in ("hidden", "blocks", "heads", "vocabulary", "positions"):
        if not sizes[name]:
            hint = "take the config.json of a language model"
            raise EstimateError(f"{path} has no {' or '.join(_NAMES[name])}", hint=hint)
    tokens = sequence or sizes["positions"]
    if family.learned_positions and tokens > sizes["positions"]:
        message = f"{tokens} tokens, and {path} has {sizes['positions']} learned positions"
        raise EstimateError(message, hint="use a shorter sequence")
    return Transformer(
        sizes["hidden"],
        sizes["blocks"],
        sizes["heads"],
        sizes["vocabulary"],
        tokens,
        sizes["feed_forward"] or 4 * sizes["hidden"],
        key_heads=sizes["key_heads"],
        head_size=sizes["head_size"],
        gated=family.gated,
        tied=family.tied if tied is None else tied,
        positions=sizes["positions"] if family.learned_positions else 0,
    )
