"""Jobs for rehearsal GPUs: small, so that a command takes seconds."""

from dataclasses import replace
from itertools import islice

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import penstock as ps

WIDTH, WORDS, LENGTH = 16, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Words(nn.Module):
    """A few blocks between a table and a head."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data(start: int):
    while True:
        drawn = torch.Generator().manual_seed(start)
        words = torch.randint(0, WORDS, (2, LENGTH + 1), generator=drawn)
        yield words[:, :-1].contiguous(), words[:, 1:].contiguous()
        start += 1


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).view(-1, WORDS), y.reshape(-1))


def entered_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """As authors write who have one GPU: to the current device, whichever it is."""
    return loss(model, tuple(each.cuda() for each in batch))


def branching_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Look at a number: no trace holds both ways on."""
    found = loss(model, batch)
    return found * 2 if found.item() > 1 else found


def untraceable() -> ps.Job:
    return replace(job(), loss=branching_loss)


def job() -> ps.Job:
    return ps.Job(
        model=Words,
        loss=entered_loss if torch.cuda.is_available() else loss,
        data=data,
        optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
        micro_batches=4,
        num_steps=4,
        clip_norm=1.0,
        validation=lambda: list(islice(data(1000), 2)),
    )


def in_halves() -> ps.Job:
    return replace(job(), precision="float16")
