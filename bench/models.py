"""The models of the benches: one GPT in two sizes, as pieces that can be cut between any two.

gpt    bound by matrix products: 8 blocks of width 256, two windows of 128 tokens
tiny   bound by everything else: 8 blocks of width 64, one window of 64 tokens

Letters of tensor shapes: B windows of a micro-batch, T tokens of a window, D width, H heads.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from penstock.job import Job


class Enter(nn.Module):
    """Tokens to vectors."""

    def __init__(self, size: "Size") -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.window, size.width)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.token(tokens_BT) + self.position(places_T)


class Block(nn.Module):
    """Attention and a two-layer network, each added to the stream of width D."""

    def __init__(self, size: "Size") -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.mix = nn.Linear(size.width, size.width)
        self.norm_hidden = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_hidden(x_BTD))))

    def attention(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        return self.mix(mixed_BHTd.transpose(1, 2).reshape(B, T, D))


class Leave(nn.Module):
    """Vectors to logits."""

    def __init__(self, size: "Size") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.head(self.norm(x_BTD))


class Pieces(nn.Module):
    """The pieces `numbers` of the whole GPT, one after another, under the names they have there."""

    def __init__(self, size: "Size", numbers: Iterable[int]) -> None:
        super().__init__()
        makers = [Enter, *[Block] * size.blocks, Leave]
        self.pieces = nn.ModuleDict({str(k): makers[k](size) for k in numbers})

    def forward(self, x: Tensor) -> Tensor:
        for piece in self.pieces.values():
            x = piece(x)
        return x


@dataclass(frozen=True, slots=True)
class Size:
    """One of the models, and one micro-batch of it."""

    name: str
    width: int
    window: int
    micro_batch: int
    blocks: int = 8
    heads: int = 4
    vocabulary: int = 1024

    def pieces_of(self, num_stages: int) -> list[list[int]]:
        """Return the pieces of each stage: equal blocks, the first enters, the last leaves.

        Raises:   ValueError: the blocks cannot be divided among so many.
        """
        if self.blocks % num_stages:
            raise ValueError(f"{self.blocks} blocks cannot be divided among {num_stages} stages")
        share = self.blocks // num_stages
        stages = [[1 + s * share + k for k in range(share)] for s in range(num_stages)]
        stages[0].insert(0, 0)
        stages[-1].append(self.blocks + 1)
        return stages

    def job(self) -> Job:
        """Return the whole model as a job that has no optimizer to speak of."""
        whole = range(self.blocks + 2)
        return Job(model=lambda: Pieces(self, whole), loss=loss, data=self.data, optimizer=Nothing)

    def data(self, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro-batches of random tokens and their labels; the same ones again and again."""
        made = micro_batches(self)
        return itertools.islice(itertools.cycle(made), start % len(made), None)


@cache
def micro_batches(size: Size) -> list[tuple[Tensor, Tensor]]:
    """Return 32 different micro-batches; made once, for making them is not what is timed."""
    generator = torch.Generator().manual_seed(0)
    shape = (32, size.micro_batch, size.window + 1)
    tokens = torch.randint(size.vocabulary, shape, generator=generator)
    return [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]


GPT = Size("gpt", width=256, window=128, micro_batch=2)
TINY = Size("tiny", width=64, window=64, micro_batch=1)
SIZES = (GPT, TINY)


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Return the mean loss of one micro-batch."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean loss of one micro-batch, as a Job wants it."""
    tokens_BT, labels_BT = batch
    return cross_entropy(model(tokens_BT), labels_BT)


class Nothing(Optimizer):
    """An optimizer whose step does nothing: what is timed is forward, backward and the sum."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})

    def step(self, closure: object = None) -> None:
        pass
