"""A job whose model, with what trains it, is larger than a rehearsal GPU; its memory says so."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import penstock as ps

WIDTH, WORDS, LENGTH, BLOCKS = 128, 32, 2, 8
WEIGHT_BYTES = 4 * (2 * WORDS * WIDTH + BLOCKS * (4 * WIDTH * WIDTH + 5 * WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def data(start: int):
    while True:
        drawn = torch.Generator().manual_seed(start)
        yield torch.randint(0, WORDS, (2, LENGTH), generator=drawn)
        start += 1


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch = batch.cuda() if torch.cuda.is_available() else batch
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def branching_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = loss(model, batch)
    return found * 2 if found.item() > 1 else found


def job() -> ps.Job:
    return ps.Job(
        model=Large,
        loss=loss,
        data=data,
        optimizer=lambda parameters: SGD(parameters, lr=1e-2, momentum=0.9),
        micro_batches=4,
        num_steps=3,
        validation=lambda: [next(data(1000))],
    )


def untraceable() -> ps.Job:
    return replace(job(), loss=branching_loss)


def in_bf16() -> ps.Job:
    return replace(job(), precision="bfloat16")


def deadly_data(start: int):
    """Kill rank 1 in step 3 of an elastic run that is under way."""
    for number, batch in enumerate(data(start), start):
        is_there = Path("run/elastic.json").exists() and os.environ.get("LOCAL_RANK") == "1"
        if is_there and number >= 8:
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def deadly() -> ps.Job:
    return replace(job(), data=deadly_data, num_steps=6)
