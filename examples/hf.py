"""Nine architectures of Hugging Face transformers, tiny and with random weights, as jobs.

    penstock check examples/hf.py:llama --stages 4 --schedule zb_h1
    penstock train examples/hf.py:gpt2 --steps 20 --out runs/gpt2

Nothing is downloaded: configurations and data are made here.  Dropout stays as the library has it.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import count

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import penstock as ps

SAMPLES, TOKENS, TARGET_TOKENS = 2, 32, 16  # of one micro-batch
VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 4

Batch = dict[str, Tensor]


def hugging_face(
    model: type[PreTrainedModel],
    config: PretrainedConfig,
    batch: Callable[[torch.Generator], Batch],
) -> ps.Job:
    """Return the job of a model whose output has a loss; `batch` draws one micro-batch."""

    def build() -> nn.Module:
        return model(config)

    def loss(module: nn.Module, batch: Batch) -> Tensor:
        return module(**batch).loss

    def data(start: int) -> Iterator[Batch]:
        for index in count(start):
            yield batch(torch.Generator().manual_seed(index))

    return ps.Job(build, loss, data, optimizer, micro_batches=8, num_steps=20)


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(weights, lr=1e-3)


def tokens(source: torch.Generator, length: int = TOKENS) -> Tensor:
    """Return token numbers from 4 on, the first ones being special; the smaller, the more often."""
    shares = torch.rand(SAMPLES, length, generator=source)
    return 4 + (shares.square() * (VOCABULARY - 4)).long()


def next_tokens(source: torch.Generator) -> Batch:
    drawn = tokens(source)
    return {"input_ids": drawn, "labels": drawn}


def masked_tokens(source: torch.Generator) -> Batch:
    """Hide about 15 % of the tokens; only those enter the loss."""
    drawn = tokens(source)
    hidden = torch.rand(drawn.shape, generator=source) < 0.15
    hidden[:, 0] = True
    return {
        "input_ids": drawn.masked_fill(hidden, 3),
        "attention_mask": torch.ones_like(drawn),
        "labels": drawn.masked_fill(~hidden, -100),
    }


def translation(source: torch.Generator) -> Batch:
    return {"input_ids": tokens(source), "labels": tokens(source, TARGET_TOKENS)}


def image(source: torch.Generator) -> Batch:
    """The label is how bright the image is."""
    labels = torch.randint(10, (SAMPLES,), generator=source)
    noise = torch.randn(SAMPLES, 3, 32, 32, generator=source)
    return {"pixel_values": noise + labels[:, None, None, None] / 5, "labels": labels}


def speech(source: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(SAMPLES, 16, 2 * TOKENS, generator=source),
        "labels": tokens(source, TARGET_TOKENS),
    }


def gpt2() -> ps.Job:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=TOKENS,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face(GPT2LMHeadModel, config, next_tokens)


def llama() -> ps.Job:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=TOKENS,
    )
    return hugging_face(LlamaForCausalLM, config, next_tokens)


def bert() -> ps.Job:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=TOKENS,
    )
    return hugging_face(BertForMaskedLM, config, masked_tokens)


def t5() -> ps.Job:
    """An encoder and a decoder; the decoder's blocks all read the encoder's last output."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        d_ff=2 * WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
    )
    return hugging_face(T5ForConditionalGeneration, config, translation)


def vit() -> ps.Job:
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_labels=10,  # pyright: ignore[reportCallIssue]
    )
    return hugging_face(ViTForImageClassification, config, image)


def resnet() -> ps.Job:
    """Convolutions and batch norm, whose running statistics every forward changes."""
    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 48, 64],
        depths=[2, 2, 2, 2],
        layer_type="basic",
        num_labels=10,  # pyright: ignore[reportCallIssue]
    )
    return hugging_face(ResNetForImageClassification, config, image)


def mixtral() -> ps.Job:
    """A mixture of experts: each token goes to two of four."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        num_local_experts=4,
        max_position_embeddings=TOKENS,
    )
    return hugging_face(MixtralForCausalLM, config, next_tokens)


def whisper() -> ps.Job:
    """Sound in, tokens out: convolutions, an encoder and a decoder."""
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=16,
        d_model=WIDTH,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH,
        max_source_positions=TOKENS,
        max_target_positions=TARGET_TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return hugging_face(WhisperForConditionalGeneration, config, speech)


def mamba() -> ps.Job:
    """A state-space model: a scan over the tokens instead of attention."""
    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=8,
        num_hidden_layers=LAYERS,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return hugging_face(MambaForCausalLM, config, next_tokens)
