"""Experts that never meet: a diffusion model trained as several, and a router between them.

    python examples/experts.py                       trains all, in processes of their own; compares
    penstock train examples/experts.py:expert_0      one of them, as on an island of its own

Points in the plane come from eight blobs, which are divided among experts.  Each learns, from its
own points alone, the velocity by which noise flows to them; the router learns whose a point on its
way is.  The velocity of the whole is theirs, each times what the router gives it: no gradient
passes between them.  Blobs are normal, so the true velocity is known, and the sum is compared with
it.  Experts on points divided at random learn it less well in as many steps.

Source: "Decentralized Diffusion Models", arXiv:2501.05450.

Letters of tensor shapes: P points, K blobs, X experts.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import penstock as ps

BLOBS, EXPERTS, SPREAD, RADIUS = 8, 4, 0.15, 2.0
POINTS, STEPS = 512, 600
HELD_OUT = 1_000_000

Batch = dict[str, Tensor]


def centres() -> Tensor:
    """Return the centres of the blobs, on a circle: [K, 2]."""
    angle_K = 2 * math.pi * torch.arange(BLOBS) / BLOBS
    return RADIUS * torch.stack([angle_K.cos(), angle_K.sin()], 1)


def expert_of(blob_P: Tensor) -> Tensor:
    """Return whose points those of a blob are: neighbours on the circle share an expert."""
    return blob_P * EXPERTS // BLOBS


def paths(number: int, blobs: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return points on their way from noise to some blobs: place, time, velocity, blob."""
    generator = torch.Generator().manual_seed(number)
    blob_P = torch.tensor(blobs)[torch.randint(len(blobs), (POINTS,), generator=generator)]
    goal_P2 = centres()[blob_P] + SPREAD * torch.randn(POINTS, 2, generator=generator)
    noise_P2 = torch.randn(POINTS, 2, generator=generator)
    time_P1 = torch.rand(POINTS, 1, generator=generator)
    return (1 - time_P1) * noise_P2 + time_P1 * goal_P2, time_P1, goal_P2 - noise_P2, blob_P


def blob_parts(place_P2: Tensor, time_P1: Tensor) -> tuple[Tensor, Tensor]:
    """Return each blob's share of the points at a place and time, and its own velocity there.

    On the way, blob k is a normal with centre t * c_k and variance (1 - t)^2 + (t * SPREAD)^2 in
    each direction; its velocity there is E[goal - noise].
    """
    variance_P1 = (1 - time_P1) ** 2 + (time_P1 * SPREAD) ** 2
    away_PK2 = place_P2[:, None] - time_P1[..., None] * centres()
    share_PK = torch.softmax(-away_PK2.square().sum(-1) / (2 * variance_P1), 1)
    pull_P1 = (time_P1 * SPREAD**2 - (1 - time_P1)) / variance_P1
    return share_PK, centres() + pull_P1[..., None] * away_PK2


def true_velocity(place_P2: Tensor, time_P1: Tensor) -> Tensor:
    """Return the velocity by which noise flows to all blobs: [P, 2]."""
    share_PK, velocity_PK2 = blob_parts(place_P2, time_P1)
    return (share_PK[..., None] * velocity_PK2).sum(1)


def network(outputs: int) -> nn.Module:
    layers = [nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs)]
    return nn.Sequential(*layers)


def combined(
    experts: Iterable[nn.Module], router: nn.Module, place_P2: Tensor, time_P1: Tensor
) -> Tensor:
    """Return the sum of the experts' velocities, each times its share: [P, 2]."""
    into_P3 = torch.cat([place_P2, time_P1], 1)
    share_PX = torch.softmax(router(into_P3), 1)
    velocity_PX2 = torch.stack([expert(into_P3) for expert in experts], 1)
    return (share_PX[..., None] * velocity_PX2).sum(1)


def seen_by(expert: int, number: int, at_random: bool) -> Batch:
    """Return micro-batch `number` of an expert: of its own blobs, or of all, as it comes."""
    blobs = [blob for blob in range(BLOBS) if int(expert_of(torch.tensor(blob))) == expert]
    part = tuple(range(BLOBS) if at_random else blobs)
    place_P2, time_P1, velocity_P2, _ = paths(number * EXPERTS + expert, part)
    return {"into": torch.cat([place_P2, time_P1], 1), "out": velocity_P2}


def asked_of_router(number: int) -> Batch:
    """Return micro-batch `number` of the router: points of all blobs, and whose each is."""
    place_P2, time_P1, _, blob_P = paths(HELD_OUT // 2 + number, tuple(range(BLOBS)))
    return {"into": torch.cat([place_P2, time_P1], 1), "out": expert_of(blob_P)}


def far_off(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["into"]) - batch["out"]).square().mean()


def wrong(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["into"]), batch["out"])


def endless(micro_batch: Callable[[int], Batch], start: int) -> Iterator[Batch]:
    while True:
        yield micro_batch(start)
        start += 1


def optimizer(weights: Iterable[nn.Parameter]) -> Optimizer:
    return Adam(weights, lr=3e-3)


def expert(number: int, at_random: bool = False) -> ps.Job:
    """Return the job of one expert; `at_random`: of one that is given points of all blobs."""
    return _job(partial(network, 2), far_off, partial(seen_by, number, at_random=at_random))


def router() -> ps.Job:
    return _job(partial(network, EXPERTS), wrong, asked_of_router)


def _job(
    model: Callable[[], nn.Module],
    loss: Callable[[nn.Module, Batch], Tensor],
    micro_batch: Callable[[int], Batch],
) -> ps.Job:
    return ps.Job(
        model=model,
        loss=loss,
        data=partial(endless, micro_batch),
        optimizer=optimizer,
        micro_batches=1,
        num_steps=STEPS,
        learning_rate=lambda step: 1 - 0.95 * step / STEPS,
    )


expert_0, expert_1, expert_2, expert_3 = (partial(expert, number) for number in range(EXPERTS))


def distance(velocity: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Return how far a velocity is from the true one, as a part of it, on points not trained on."""
    place_P2, time_P1, _, _ = paths(HELD_OUT, tuple(range(BLOBS)))
    true_P2 = true_velocity(place_P2, time_P1)
    off_P2 = velocity(place_P2, time_P1) - true_P2
    return float(off_P2.square().sum().sqrt() / true_P2.square().sum().sqrt())


def main() -> None:
    """Train the experts and the router, each by a command of its own, and compare their sum."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    names = [*(f"expert_{number}" for number in range(EXPERTS)), "router"]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            where = ["--out", f"{folder}/{name}", "--steps", str(steps), "--ranks", "1"]
            command = [sys.executable, "-m", "penstock", "train", f"{__file__}:{name}", *where]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        made = [network(2) for _ in range(EXPERTS)]
        routing = network(EXPERTS)
        for name, module in zip(names, [*made, routing], strict=True):
            ps.load_weights(module, Path(folder) / name)
        with torch.no_grad():
            off = distance(partial(combined, made, routing))
    print(f"velocity of {EXPERTS} experts and a router: {100 * off:.1f} % off the true one")


if __name__ == "__main__":
    main()
