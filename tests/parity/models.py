"""Tiny models and their jobs, and the plain loop that every run is held against."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, Optimizer

from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.graph import Graph
from penstock.graph.trace import Capture, build, capture, loss_of
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.schedule import SCHEDULES, Schedule
from penstock.schedule.recipe import any_schedule, built

WIDTH, HEADS, TOKENS, SAMPLES, VOCABULARY, BLOCKS = 16, 2, 6, 3, 11, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a key's bias has no gradient
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).view(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + F.dropout(self.mix(mixed.transpose(1, 2).reshape(x.shape)), rate, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(x))), rate, self.training)


class GPT(nn.Module):
    """Tokens in, logits out; with `tied` one matrix embeds and unembeds."""

    def __init__(self, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Normed(nn.Module):
    """Layers with batch norm: every forward changes running statistics."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(BLOCKS))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).flatten(0, 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + self.dropout(torch.relu(norm(layer(x))))
        return self.head(x).view(*tokens.shape, VOCABULARY)


class Chain(nn.Module):
    """Linear layers of which some are frozen; the loss does not use the last."""

    def __init__(self, frozen: Sequence[int]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.unused = nn.Linear(WIDTH, WIDTH)
        for number in frozen:
            self.layers[number].requires_grad_(False)
        self.embedding.requires_grad_(0 not in frozen)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "dropout": lambda: GPT(0.2),
    "tied": lambda: GPT(0.2, tied=True),
    "batch_norm": lambda: Normed(0.2),
    "frozen": lambda: Chain([3, 4]),  # a stage that has nothing to train
    "frozen_start": lambda: Chain([0, 1, 2, 3, 4]),  # stages that have no backward pass at all
}

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: Adam(parameters, lr=2e-3),
    "adamw": lambda parameters: AdamW(parameters, lr=2e-3, weight_decay=0.1),
}


def data(start: int) -> Iterator[dict[str, Tensor]]:
    for index in count(start):
        source = torch.Generator().manual_seed(index)
        tokens = torch.randint(VOCABULARY, (SAMPLES, TOKENS + 1), generator=source)
        yield {"tokens": tokens[:, :-1].contiguous(), "next": tokens[:, 1:].contiguous()}


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["next"].flatten())


def job_of(name: str, dtype: torch.dtype, optimizer: str = "sgd", **options) -> Job:
    """Return the job of one of MODELS, trained by one of OPTIMIZERS."""
    make = MODELS[name]
    return Job(lambda: make().to(dtype), loss, data, OPTIMIZERS[optimizer], seed=3, **options)


@cache
def captured(name: str, dtype: torch.dtype) -> Capture:
    """Return the traced step of one of MODELS; it is the same for every optimizer."""
    return capture(job_of(name, dtype))


TRAINING = tuple(
    make.__name__ for make in SCHEDULES if any(a.kind in "BI" for a in make(1, 1).orders[0])
)


def plan_of(
    graph: Graph, schedule: str | Schedule, stages: int, micro_batches: int, **options: int | bool
) -> Plan:
    """Return a plan with evenly spread cuts, on as many ranks as the schedule wants."""
    points = len(graph.cut_points)
    cuts = [(points * number) // stages for number in range(1, stages)]
    ranks = built(any_schedule(schedule), stages, micro_batches).num_ranks
    options = {"num_ranks": ranks, **options}
    return plan_by_hand(graph, cuts, schedule, num_micro_batches=micro_batches, **options)


class Trained(NamedTuple):
    """What training gave: the loss of every step, weights and buffers by name."""

    losses: list[float]
    weights: Mapping[str, Tensor]


def plain_loop(job: Job, num_steps: int, micro_batches: int) -> Trained:
    """Train the uncut model by eager autograd in one process, `micro_batches` a step."""
    model, _ = build(job)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = job.optimizer(parameters)
    rates = [group["lr"] for group in optimizer.param_groups]
    batches, losses = job.data(0), []
    for step in range(num_steps):
        optimizer.zero_grad()
        parts = []
        for number in range(micro_batches):
            batch = next(batches)
            with SeededRandom(micro_batch_seed(job.seed, step * micro_batches + number)):
                part = loss_of(job, model, batch)
                (part / micro_batches).backward()
            parts.append(part.detach().double())
        if job.clip_norm is not None:
            clip_grad_norm_(parameters, job.clip_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (job.learning_rate(step) if job.learning_rate else 1.0)
        optimizer.step()
        losses.append(float(torch.stack(parts).mean()))
    return Trained(losses, state_of(model))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    weights = {f"weights/{n}": p.detach() for n, p in model.named_parameters()}
    return weights | {f"buffers/{n}": b for n, b in model.named_buffers()}


def with_optimizer(job: Job, optimizer: str, **options) -> Job:
    return replace(job, optimizer=OPTIMIZERS[optimizer], **options)
