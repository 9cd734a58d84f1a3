"""Jobs whose plans are proved on a GPU: each says something that another does not."""

from dataclasses import replace
from itertools import islice, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from bench.models import Size
from penstock.job import Job

SMALL = Size("small", width=64, window=32, micro_batch=4, blocks=2, vocabulary=256)


def plain() -> Job:
    """A GPT, AdamW, gradients clipped."""
    job = replace(SMALL.job(), optimizer=lambda ps: AdamW(ps, 1e-3), micro_batches=4, num_steps=2)
    return replace(job, clip_norm=1.0, validation=lambda: list(islice(SMALL.data(0), 2)))


def unclipped() -> Job:
    return replace(plain(), clip_norm=None)


def bfloat16() -> Job:
    return replace(plain(), precision="bfloat16")


def float16() -> Job:
    return replace(plain(), precision="float16")


def autocast() -> Job:
    return replace(plain(), autocast="bfloat16")


def momentum() -> Job:
    return replace(plain(), optimizer=lambda ps: SGD(ps, 0.1, momentum=0.9))


class Tied(nn.Module):
    """One table enters and leaves; dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.drop = nn.Embedding(256, 64), nn.Dropout(0.1)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.table(tokens_BT)
        for layer in self.layers:
            x_BTD = x_BTD + self.drop(F.gelu(layer(x_BTD)))
        return x_BTD @ self.table.weight.T


def tied() -> Job:
    return replace(plain(), model=Tied)


def images(start: int):
    while True:
        drawn = torch.Generator().manual_seed(start)
        yield (
            torch.randn(8, 3, 16, 16, generator=drawn),
            torch.randint(10, (8,), generator=drawn),
        )
        start += 1


def of_images(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def convolutions() -> Job:
    """Convolutions and batch norm, whose buffers every micro-batch changes."""

    def model() -> nn.Module:
        widths = (3, 16, 32)
        layers: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    return replace(plain(), model=model, loss=of_images, data=images, validation=None)


def cuda() -> Job:
    """A loss that says `.cuda()`, as authors write who have one GPU."""
    job = plain()
    return replace(job, loss=lambda model, batch: job.loss(model, tuple(t.cuda() for t in batch)))


def untraced() -> Job:
    """A loss that looks at a number: no plan, but the plain loop on one GPU."""
    job = plain()

    def branches(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        found = job.loss(model, batch)
        return found * 2 if found.item() > 1 else found

    return replace(job, loss=branches)


PROVED = (
    plain,
    unclipped,
    bfloat16,
    float16,
    autocast,
    momentum,
    tied,
    convolutions,
    cuda,
    untraced,
)
