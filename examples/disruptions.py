"""An LSTM warns of disruptions of a plasma, in 16 bits, by as many workers as there are.

    penstock train examples/disruptions.py --out runs/f16                  float16
    penstock train examples/disruptions.py:bfloat16 --out runs/bf16
    penstock train examples/disruptions.py:float32 --out runs/f32

A shot is a few signals over time.  In some shots a wave grows until the plasma is lost; in others
it grows, and dies down again.  At each moment the net says whether the plasma will be lost within
the next moments.  The shots are made here, by the equations of `shots`.

In 16 bits: weights and numbers of forward and backward, and gradients on their way from worker to
worker.  The optimizer keeps weights in float32; in float16 the loss is scaled, and a step that
overflows is left out by all workers.  The rate is each worker's own times their number, clipped.

Source: "Training distributed deep recurrent neural networks with mixed precision on GPU clusters",
arXiv:1912.00286.

Letters of tensor shapes: B shots, T moments, S signals.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import penstock as ps

SHOTS, MOMENTS, SIGNALS = 16, 64, 4
AHEAD = 12  # moments before the loss in which to warn
WIDTH, LAYERS = 32, 2
WORKERS, STEPS = 4, 200
RATE, MOST, DECAY, EPOCH = 2e-3, 6e-3, 0.8, 50  # of a worker; of all; an epoch's, in steps
HELD_OUT = 1_000_000  # micro-batches from here on are for validation

Batch = dict[str, Tensor]


def shots(number: int) -> Batch:
    """Return shots of micro-batch `number`: signals, whether to warn, and which moments count.

    A wave begins at some moment and grows by an eighth each.  Where the plasma is lost it goes on
    to grow; elsewhere it dies down after some moments.  The signals are the wave, how fast it
    turns (slower as it grows), what is left of the heat, and noise.
    """
    generator = torch.Generator().manual_seed(number)
    begin_B1, turn_B1, heal_B1 = torch.rand(3, SHOTS, 1, generator=generator).unbind(0)
    lost_B1 = torch.rand(SHOTS, 1, generator=generator) < 0.5
    age_BT = torch.arange(MOMENTS) - 4 - begin_B1 * MOMENTS / 2
    grown_BT = age_BT.clamp(0).minimum(torch.where(lost_B1, MOMENTS, 8 + 14 * heal_B1))
    wave_BT = 0.05 * (grown_BT - 2 * (age_BT - grown_BT).clamp(0)).div(8).exp() * (age_BT > 0)
    end_B1 = 4 + begin_B1 * MOMENTS / 2 + 28  # of the plasma: the wave is as large as it can be
    there_BT = (torch.arange(MOMENTS) < end_B1) | ~lost_B1
    warn_BT = lost_B1 & (torch.arange(MOMENTS) >= end_B1 - AHEAD) & there_BT
    speed_BT = 1 / (1 + 2 * wave_BT)
    phase_BT = 2 * torch.pi * turn_B1 + speed_BT.cumsum(1)
    clean = wave_BT * phase_BT.cos(), speed_BT, 1 - wave_BT.square().cumsum(1) / 8
    signals_BTS = torch.stack([*clean, torch.zeros_like(wave_BT)], 2)
    signals_BTS += 0.2 * torch.randn(signals_BTS.shape, generator=generator)
    counts_BT = there_BT.float()
    return {"signals": signals_BTS * counts_BT[..., None], "warn": warn_BT, "counts": counts_BT}


def data(start: int) -> Iterator[Batch]:
    while True:
        yield shots(start)
        start += 1


def validation() -> Iterable[Batch]:
    return [shots(HELD_OUT + number) for number in range(8)]


class Alarm(nn.Module):
    """Signals in, at each moment how sure it is that the plasma will soon be lost."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.over_time = nn.LSTM(SIGNALS, width, layers, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, signals_BTS: Tensor) -> Tensor:
        return self.out(self.over_time(signals_BTS)[0])[..., 0]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    sure_BT, warn_BT = model(batch["signals"]).float(), batch["warn"].float()
    each_BT = F.binary_cross_entropy_with_logits(sure_BT, warn_BT, reduction="none")
    return (each_BT * batch["counts"]).mean()


def metrics(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return how many moments are judged rightly, and of how many."""
    right_BT = (model(batch["signals"]) > 0) == batch["warn"]
    return {"right": ((right_BT * batch["counts"]).sum(), batch["counts"].sum())}


def rate(step: int, workers: int) -> float:
    """Return the rate of a step: a worker's own, which decays, times their number, clipped."""
    return min(MOST, ps.scaled_rate(RATE * DECAY ** (step // EPOCH), workers, 1))


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(weights, lr=1.0)  # times `rate`


def alarm(
    bits: Literal["float16", "bfloat16"] | None = "float16", workers: int = WORKERS
) -> ps.Job:
    """Return the job of so many workers, each with a micro-batch of its own in every step."""
    return ps.Job(
        model=Alarm,
        loss=loss,
        data=data,
        optimizer=optimizer,
        micro_batches=workers,
        num_steps=STEPS,
        learning_rate=partial(rate, workers=workers),
        validation=validation,
        metrics=metrics,
        precision=bits,
        sums=bits,
    )


job = partial(alarm)
bfloat16, float32 = partial(alarm, "bfloat16"), partial(alarm, None)
