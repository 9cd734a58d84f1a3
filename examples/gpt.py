"""A byte-level GPT learns the source of the Python standard library: the main job.

    penstock train examples/gpt.py --out runs/gpt

The model is plain PyTorch and the text is on every machine that has Python.  One file in ten, in
sorted order, is held out for validation; package and test folders are left out.

Letters of tensor shapes: B windows of a micro-batch, T bytes of a window, D width, H heads.
"""

import itertools
import math
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import penstock as ps

VOCABULARY = 256  # bytes
WINDOW = 64  # bytes that the model sees at once
WIDTH, HEADS, BLOCKS = 192, 6, 8

WINDOWS_PER_MICRO_BATCH = 4
MICRO_BATCHES = 8  # per step: 8 * 4 * 64 = 2,048 bytes
STEPS = 210
WARM_UP_STEPS = 16
PEAK_RATE = 1.5e-3
VALIDATION_MICRO_BATCHES = 128  # 32,768 bytes

Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a two-layer network, each added to the stream of width D."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_hidden = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD))
        return x_BTD + self.down(F.gelu(self.up(self.norm_hidden(x_BTD))))

    def attention(self, x_BTD: Tensor) -> Tensor:
        """Return, for each byte, a mixture of the bytes up to it."""
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        return self.mix(mixed_BHTd.transpose(1, 2).reshape(B, T, D))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    The output matrix is not tied to the embedding: at 256 bytes of vocabulary it is 1.3 % of the
    weights, and tied it would make the first and the last blocks exchange gradients every step.
    """

    def __init__(self, width: int = WIDTH, heads: int = HEADS, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(WINDOW, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, weight in self.named_parameters():
            if name.endswith(("mix.weight", "down.weight")):  # 2 * blocks of them add up
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * blocks))
            elif weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        positions_T = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTD = self.embedding(bytes_BT) + self.position(positions_T)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the next byte, in nats."""
    logits = model(batch["bytes"])
    return F.cross_entropy(logits.flatten(0, 1), batch["next_bytes"].flatten())


@cache
def text() -> tuple[Tensor, Tensor]:
    """Return the bytes for training and for validation, every tenth file being for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if left_out.isdisjoint(path.relative_to(root).parts)
    ]
    held_out = files[::10]
    rest = sorted(set(files) - set(held_out))
    parts = (b"".join(path.read_bytes() for path in paths) for paths in (rest, held_out))
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, validation


def micro_batch(source_N: Tensor, starts_B: Tensor) -> Batch:
    """Return the windows of `source_N` that begin at `starts_B`, each with its next bytes."""
    windows_BT = source_N[starts_B[:, None] + torch.arange(WINDOW + 1)].long()
    before_BT, after_BT = windows_BT[:, :-1], windows_BT[:, 1:]
    return {"bytes": before_BT.contiguous(), "next_bytes": after_BT.contiguous()}


def data(start: int) -> Iterator[Batch]:
    """Yield micro-batches from index `start` on; the index alone decides what is in one."""
    train_N = text()[0]
    for index in itertools.count(start):
        seeded = torch.Generator().manual_seed(index)
        starts_B = torch.randint(
            len(train_N) - WINDOW, (WINDOWS_PER_MICRO_BATCH,), generator=seeded
        )
        yield micro_batch(train_N, starts_B)


def validation() -> Iterator[Batch]:
    """Yield windows spread evenly over the validation text, always the same."""
    validation_N = text()[1]
    count = VALIDATION_MICRO_BATCHES * WINDOWS_PER_MICRO_BATCH
    starts = torch.linspace(0, len(validation_N) - WINDOW - 1, count, dtype=torch.float64).long()
    for starts_B in starts.split(WINDOWS_PER_MICRO_BATCH):
        yield micro_batch(validation_N, starts_B)


def facts() -> dict[str, float]:
    """Return the unigram entropy of the validation text: what knowing only byte counts gives."""
    counts = torch.bincount(text()[1].long(), minlength=VOCABULARY).double()
    shares = counts[counts > 0] / counts.sum()
    nats = -(shares * shares.log()).sum().item()
    return {"unigram_entropy_nats": nats, "unigram_entropy_bits": nats / math.log(2)}


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(weights, lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.1)


def learning_rate(step: int) -> float:
    """Return the share of the peak rate: a straight rise, then half a cosine down to a tenth."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / (STEPS - WARM_UP_STEPS)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * min(1.0, done))) / 2


def job() -> ps.Job:
    return _job(GPT, MICRO_BATCHES)


def large() -> ps.Job:
    """Return the job with 101 million weights and a larger step: something to plan for GPUs."""
    return _job(lambda: GPT(width=1024, heads=16), 4 * MICRO_BATCHES)


def _job(model: Callable[[], GPT], micro_batches: int) -> ps.Job:
    return ps.Job(
        model=model,
        loss=loss,
        data=data,
        optimizer=optimizer,
        micro_batches=micro_batches,
        num_steps=STEPS,
        clip_norm=1.0,
        validation=validation,
        learning_rate=learning_rate,
        facts=facts,
    )
