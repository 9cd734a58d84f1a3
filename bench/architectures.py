"""Architectures: thirty small models, of transformers and by hand, as jobs for bench.check."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from penstock.job import Job

VOCABULARY, CLASSES = 64, 5
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
Batch = dict[str, Tensor]
Draw = Callable[[torch.Generator], Batch]


class Recurrent(nn.Module):
    """An LSTM or GRU over embedded tokens."""

    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.cells = cell(16, 24, batch_first=True, **options)
        self.head = nn.Linear(24 * (2 if self.cells.bidirectional else 1), VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(self.embedding(x))[0])


class Encoder(nn.Module):
    """torch.nn's own encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(x)))


class Experts(nn.Module):
    """Three layers of four experts, of which every token has two."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.gates = nn.ModuleList(nn.Linear(16, 4) for _ in range(3))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 16) for _ in range(4)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.embedding(x)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            weights, chosen = gate(y).softmax(-1).topk(2, -1)
            shares = [((chosen == number) * weights).sum(-1, keepdim=True) for number in range(4)]
            y = y + sum(w * F.relu(e(y)) for w, e in zip(shares, experts, strict=True))
        return self.head(y)


class UNet(nn.Module):
    """Down, across and up, with a connection past both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.deeper = nn.Sequential(
            nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU()
        )
        self.middle = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.Dropout2d(0.1), nn.ReLU())
        self.up, self.head = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.down(x)
        narrow = self.deeper(wide)
        return self.head(torch.cat([wide, self.up(self.middle(narrow) + narrow)], 1))


class Autoencoder(nn.Module):
    """A variational one: it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 16))
        self.decode = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 20))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).mean()
        return self.decode(drawn), divergence


class Clicks(nn.Module):
    """Bags of embeddings and dense features, multiplied pair by pair."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum") for _ in range(3))
        self.dense = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, items: Tensor) -> Tensor:
        rows = [self.dense(dense), *(bag(items[:, at]) for at, bag in enumerate(self.bags))]
        features = torch.stack(rows, 1)
        i, j = torch.triu_indices(4, 4, 1)
        products = (features @ features.transpose(1, 2))[:, i, j]
        return self.head(torch.cat([features[:, 0], products], 1)).squeeze(-1)


def _tokens(source: torch.Generator) -> Batch:
    ids = torch.randint(4, VOCABULARY, (2, 12), generator=source)
    return {"input_ids": ids, "labels": ids.clone()}


def _images(source: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 32, 32, generator=source)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (2,), generator=source)}


def _pixels(source: torch.Generator) -> Batch:
    classes = torch.randint(0, CLASSES, (2, 16, 16), generator=source)
    return {"x": torch.randn(2, 3, 16, 16, generator=source), "y": classes}


def _vectors(source: torch.Generator) -> Batch:
    return {"x": torch.randn(4, 20, generator=source)}


def _clicks(source: torch.Generator) -> Batch:
    items = torch.randint(0, 50, (4, 3, 2), generator=source)
    clicked = torch.rand(4, generator=source).round()
    return {"dense": torch.randn(4, 6, generator=source), "items": items, "y": clicked}


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


def _token_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def _pixel_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _autoencoder_loss(model: nn.Module, batch: Batch) -> Tensor:
    decoded, divergence = model(batch["x"])
    return F.mse_loss(decoded, batch["x"]) + divergence


def _siamese_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The same weights twice."""
    return (1 - F.cosine_similarity(model(batch["x"]), model(batch["x"].flip(0)))).mean()


def _click_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch["dense"], batch["items"]), batch["y"])


def _job(
    model: Callable[[], nn.Module],
    draw: Draw = _tokens,
    loss: Callable[[nn.Module, Batch], Tensor] = _own_loss,
) -> Job:
    def data(start: int) -> Iterator[Batch]:
        for index in itertools.count(start):
            yield draw(torch.Generator().manual_seed(index))

    return Job(model, loss, data, lambda weights: AdamW(weights, lr=1e-3), micro_batches=4)


def _published(model: str, config: str, draw: Draw = _tokens, /, **options: Any) -> Job:
    """Return the job of a class of transformers, looked up when built, with random weights."""
    return _job(lambda: getattr(hf, model)(getattr(hf, config)(**options)), draw)


def _siamese() -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8)
    )


JOBS: Mapping[str, Job] = {
    "neox": _published("GPTNeoXForCausalLM", "GPTNeoXConfig", **COMMON),
    "opt": _published("OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=32, **COMMON),
    "bloom": _published("BloomForCausalLM", "BloomConfig", n_layer=4, n_head=4, **COMMON),
    "mistral": _published("MistralForCausalLM", "MistralConfig", num_key_value_heads=2, **COMMON),
    "qwen2": _published("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=2, **COMMON),
    "gemma": _published(
        "GemmaForCausalLM", "GemmaConfig", num_key_value_heads=2, head_dim=8, **COMMON
    ),
    "gemma2": _published(
        "Gemma2ForCausalLM", "Gemma2Config", num_key_value_heads=2, head_dim=8, **COMMON
    ),
    "phi": _published("PhiForCausalLM", "PhiConfig", **COMMON),
    "falcon": _published("FalconForCausalLM", "FalconConfig", **COMMON),
    "roberta": _published("RobertaForMaskedLM", "RobertaConfig", **COMMON),
    "distilbert": _published(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=VOCABULARY,
        dim=32,
        n_layers=4,
        n_heads=4,
        hidden_dim=64,
    ),
    "albert": _published("AlbertForMaskedLM", "AlbertConfig", embedding_size=16, **COMMON),
    "electra": _published("ElectraForMaskedLM", "ElectraConfig", embedding_size=16, **COMMON),
    "deberta": _published(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        **COMMON,
    ),
    "xlnet": _published(
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=VOCABULARY,
        d_model=32,
        n_layer=4,
        n_head=4,
        d_inner=64,
    ),
    "mamba2": _published(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=4,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        chunk_size=4,
    ),
    "bart": _published(
        "BartForConditionalGeneration",
        "BartConfig",
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    ),
    "swin": _published(
        "SwinForImageClassification",
        "SwinConfig",
        _images,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=CLASSES,
    ),
    "convnext": _published(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _images,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_stages=2,
        num_labels=CLASSES,
    ),
    "mobilenet": _published(
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        _images,
        num_labels=CLASSES,
        depth_multiplier=0.25,
        image_size=32,
    ),
    "deit": _published(
        "DeiTForImageClassification",
        "DeiTConfig",
        _images,
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=CLASSES,
    ),
    "segformer": _published(
        "SegformerForImageClassification",
        "SegformerConfig",
        _images,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[3, 3],
        strides=[2, 2],
        mlp_ratios=[2, 2],
        num_labels=CLASSES,
    ),
    "lstm": _job(lambda: Recurrent(nn.LSTM, num_layers=3, dropout=0.1), _tokens, _token_loss),
    "gru": _job(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), _tokens, _token_loss),
    "encoder": _job(Encoder, _tokens, _token_loss),
    "experts": _job(Experts, _tokens, _token_loss),
    "unet": _job(UNet, _pixels, _pixel_loss),
    "vae": _job(Autoencoder, _vectors, _autoencoder_loss),
    "dlrm": _job(Clicks, _clicks, _click_loss),
    "siamese": _job(_siamese, _vectors, _siamese_loss),
}
