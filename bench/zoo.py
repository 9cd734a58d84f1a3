"""Zoo: the models that predictions are tried on, as jobs."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from penstock.job import Job

Batch = dict[str, Tensor]


class Block(nn.Module):
    """Causal attention and a two-layer network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_attention, self.norm_hidden = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, 4, width // 4)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_hidden(x))))


class GPT(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, width: int, blocks: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.norm_first, self.norm_second = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_second(self.second(F.relu(self.norm_first(self.first(x)))))
        return F.relu(y + self.around(x))


def _images() -> nn.Module:
    widths = [16, 16, 32, 32, 64, 64, 128]
    pairs = itertools.pairwise(widths)
    body = [Residual(a, b, 1 if a == b else 2) for a, b in pairs]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)
    )


def _uneven() -> nn.Module:
    widths = [128, 512, 256, 1024, 384, 768, 192, 640, 128, 10]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Sequential(nn.Linear(a, b), nn.LayerNorm(b), nn.GELU())]
    return nn.Sequential(*layers)


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[int], Iterator[Batch]]:
    def data(start: int) -> Iterator[Batch]:
        while True:
            source = torch.Generator().manual_seed(start)
            ids = torch.randint(0, vocabulary, (batch, length + 1), generator=source)
            yield {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}
            start += 1

    return data


def _samples(*shape: int) -> Callable[[int], Iterator[Batch]]:
    def data(start: int) -> Iterator[Batch]:
        while True:
            source = torch.Generator().manual_seed(start)
            yield {
                "x": torch.randn(shape, generator=source),
                "y": torch.randint(0, 10, shape[:1], generator=source),
            }
            start += 1

    return data


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]).flatten(0, -2), batch["y"].flatten())


def _job(model: Callable[[], nn.Module], data: Callable[[int], Iterator[Batch]]) -> Job:
    return Job(model, _loss, data, lambda weights: AdamW(weights, lr=1e-4), micro_batches=8)


JOBS: dict[str, Job] = {
    "gpt": _job(lambda: GPT(256, 8, 1024, 128), _tokens(2, 128, 1024)),
    "cnn": _job(_images, _samples(16, 3, 32, 32)),
    "uneven": _job(_uneven, _samples(256, 128)),
    "small gpt": _job(lambda: GPT(64, 8, 256, 64), _tokens(4, 64, 256)),
}
