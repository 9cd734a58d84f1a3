"""A network learns to step a fluid: a surrogate for the solver that makes its data.

    penstock train examples/fluid.py --out runs/fluid
    penstock train examples/fluid.py --ranks 2     divided in any way: the same

The solver carries a dye through a steady, swirling flow and lets it diffuse, on a periodic square.
The surrogate is given the dye and the flow, and returns the dye after 16 of the solver's steps at
once.  `error` in the validation is the squared distance to the solver over that of a surrogate that
says that nothing happens.

Letters of tensor shapes: B samples, C channels, N cells along a side.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

import penstock as ps

CELLS = 32
SOLVER_STEPS = 16  # that the surrogate takes at once
STEP_S = 0.4 / CELLS  # of the solver: the fastest flow crosses less than half a cell
DIFFUSION = 2e-3
WAVES = 3  # along a side, at most

SAMPLES = 8
STEPS = 150
HELD_OUT = 1_000_000  # micro-batches from here on are for validation
WIDTH, BLOCKS = 16, 3

Batch = dict[str, Tensor]


def gradient(field_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slopes along both sides, by central differences."""
    ahead, behind = (torch.roll(field_BNN, shift, -2) for shift in (-1, 1))
    right, left = (torch.roll(field_BNN, shift, -1) for shift in (-1, 1))
    return (ahead - behind) * (CELLS / 2), (right - left) * (CELLS / 2)


def solved(dye_BNN: Tensor, flow_BCNN: Tensor, steps: int = SOLVER_STEPS) -> Tensor:
    """Return the dye after so many steps of the solver: carried along, and spread.

    d dye / dt = DIFFUSION * laplace(dye) - flow . gradient(dye), by the midpoint rule.
    """

    def change(now_BNN: Tensor) -> Tensor:
        along_y, along_x = gradient(now_BNN)
        near = sum(torch.roll(now_BNN, shift, side) for shift in (-1, 1) for side in (-2, -1))
        spread_BNN = (near - 4 * now_BNN) * (DIFFUSION * CELLS**2)
        return spread_BNN - flow_BCNN[:, 0] * along_y - flow_BCNN[:, 1] * along_x

    for _ in range(steps):
        middle_BNN = dye_BNN + STEP_S / 2 * change(dye_BNN)
        dye_BNN = dye_BNN + STEP_S * change(middle_BNN)
    return dye_BNN


def smooth(generator: torch.Generator) -> Tensor:
    """Return random fields of a few long waves, of variance 1."""
    at_N = 2 * math.pi * torch.arange(CELLS) / CELLS
    field_BNN = torch.zeros(SAMPLES, CELLS, CELLS)
    for across in range(-WAVES, WAVES + 1):
        for down in range(WAVES + 1):
            size_B, phase_B = torch.randn(2, SAMPLES, 1, 1, generator=generator).unbind(0)
            wave_NN = across * at_N[:, None] + down * at_N[None, :]
            field_BNN += size_B * torch.cos(wave_NN + math.pi * phase_B)
    field_BNN -= field_BNN.mean((-2, -1), keepdim=True)
    return field_BNN / field_BNN.std((-2, -1), keepdim=True)


def sample(number: int) -> Batch:
    """Return micro-batch `number`: dye and flow, and the dye that the solver makes of them."""
    generator = torch.Generator().manual_seed(number)
    dye_BNN, stream_BNN = smooth(generator), smooth(generator)
    along_y, along_x = gradient(stream_BNN)
    flow_BCNN = torch.stack([along_x, -along_y], 1)  # a flow that nowhere piles up
    flow_BCNN = flow_BCNN / flow_BCNN.abs().amax((1, 2, 3), keepdim=True)
    after_BNN = solved(dye_BNN, flow_BCNN)
    return {"dye": dye_BNN, "flow": flow_BCNN, "after": after_BNN}


def data(start: int) -> Iterator[Batch]:
    while True:
        yield sample(start)
        start += 1


def validation() -> Iterable[Batch]:
    return [sample(HELD_OUT + number) for number in range(4)]


class Around(nn.Module):
    """A convolution of 5 x 5 cells on a square whose sides meet, added to what it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(width, width, 5, padding=2, padding_mode="circular")
        self.out = nn.Conv2d(width, width, 1)

    def forward(self, x_BCNN: Tensor) -> Tensor:
        return x_BCNN + self.out(torch.nn.functional.gelu(self.mix(x_BCNN)))


class Surrogate(nn.Module):
    """Dye and flow in, the dye some time later out."""

    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, width, 1)
        self.blocks = nn.Sequential(*(Around(width) for _ in range(blocks)))
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, dye_BNN: Tensor, flow_BCNN: Tensor) -> Tensor:
        x_BCNN = self.into(torch.cat([dye_BNN[:, None], flow_BCNN], 1))
        return dye_BNN + self.out(self.blocks(x_BCNN))[:, 0]


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["dye"], batch["flow"]) - batch["after"]).square().mean()


def metrics(model: nn.Module, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the squared distance to the solver, and that of a surrogate that changes nothing."""
    off = (model(batch["dye"], batch["flow"]) - batch["after"]).square().sum()
    return {"error": (off, (batch["dye"] - batch["after"]).square().sum())}


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(weights, lr=3e-3)


def job() -> ps.Job:
    return ps.Job(
        model=Surrogate,
        loss=loss,
        data=data,
        optimizer=optimizer,
        micro_batches=4,
        num_steps=STEPS,
        learning_rate=lambda step: min(1.0, 2 * (1 - step / STEPS)),
        validation=validation,
        metrics=metrics,
        best="lowest val_error",
    )
