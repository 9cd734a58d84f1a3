"""A generator for each label: adversarial nets trained apart, as many at once as there is room.

    python examples/labels.py --at-once 2            four labels, two commands at a time
    penstock train examples/labels.py:label_0        one of them

One net that makes samples of every label has to balance all of them.  Here each label has a maker
and a judge of its own, which see samples of that label only.  Nothing is exchanged between labels,
so the weights are the same, to the bit, however many are trained at once.

Source: "Scalable balanced training of conditional generative adversarial neural networks on image
data", arXiv:2102.10485.

Letters of tensor shapes: P points.
"""

import argparse
import hashlib
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import Adam, Optimizer

import penstock as ps

LABELS, POINTS, STEPS = 4, 128, 400
NOISE = 4
LENGTHS = torch.tensor([1.0, 0.2])  # of each label's ellipse

Batch = dict[str, Tensor]


def real(label: int, generator: torch.Generator) -> Tensor:
    """Return points of a label: an ellipse on a circle, turned with it: [P, 2]."""
    angle = 2 * math.pi * label / LABELS
    across = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    return (torch.randn(POINTS, 2, generator=generator) * LENGTHS) @ across + 2 * across[0]


def data(start: int, label: int) -> Iterator[Batch]:
    while True:
        generator = torch.Generator().manual_seed(LABELS * start + label)
        noise = torch.randn(POINTS, NOISE, generator=generator)
        yield {"real": real(label, generator), "noise": noise}
        start += 1


def nets() -> nn.ModuleDict:
    """Return a maker of points from noise, and the judge that tells them from real ones."""
    maker = nn.Sequential(nn.Linear(NOISE, 32), nn.SiLU(), nn.Linear(32, 2))
    scores = nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1)
    judge = nn.Sequential(*scores)
    return nn.ModuleDict({"maker": maker, "judge": judge})


def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what both have to lose; neither learns from the other's part."""
    maker, judge = model.get_submodule("maker"), model.get_submodule("judge")
    made = maker(batch["noise"])
    judged = F.softplus(-judge(batch["real"])).mean() + F.softplus(judge(made.detach())).mean()
    still = {name: weight.detach() for name, weight in judge.named_parameters()}
    fooled = F.softplus(-functional_call(judge, still, (made,))).mean()
    return judged + fooled, {"judged": judged, "fooled": fooled}


def slowly(weights: Iterable[nn.Parameter], rate: float) -> Optimizer:
    return Adam(weights, lr=rate, betas=(0.0, 0.9))


def label(number: int) -> ps.Job:
    """Return the job of one label."""
    return ps.Job(
        model=nets,
        loss=loss,
        data=partial(data, label=number),
        optimizer=ps.by_name(
            {"maker.*": partial(slowly, rate=1e-3), "judge.*": partial(slowly, rate=4e-3)}
        ),
        micro_batches=1,
        num_steps=STEPS,
        seed=number,
    )


label_0, label_1, label_2, label_3 = (partial(label, number) for number in range(LABELS))


def distance(maker: nn.Module, number: int) -> float:
    """Return how far the points of a maker are from a label's: of mean and spread, in lengths."""
    generator = torch.Generator().manual_seed(number)
    target = torch.cat([real(number, generator) for _ in range(20)])
    with torch.no_grad():
        made = maker(torch.randn(len(target), NOISE, generator=generator))
    centre = (made.mean(0) - target.mean(0)).norm()
    return float(centre + (torch.cov(made.T) - torch.cov(target.T)).norm())


def trained(folder: Path, number: int, steps: int) -> Path:
    """Train one label by a command of its own, which knows of no other; return its run."""
    out = folder / f"label_{number}"
    where = ["--out", str(out), "--steps", str(steps), "--ranks", "1"]
    job = f"{__file__}:label_{number}"
    command = [sys.executable, "-m", "penstock", "train", job, *where]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return out


def main() -> None:
    """Train all labels, some at once, and print how well each is made."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        train = partial(trained, Path(folder), steps=options.steps)
        for number, run in enumerate(pool.map(train, range(LABELS))):
            torch.manual_seed(number)
            model = nets()
            begun = distance(model["maker"], number)
            ps.load_weights(model, run)
            digest = hashlib.sha256()
            for weight in model.state_dict().values():
                digest.update(weight.numpy().tobytes())
            off = distance(model["maker"], number)
            weights = digest.hexdigest()[:12]
            print(f"label {number}: {off:.2f} off, {begun:.2f} untrained, weights {weights}")


if __name__ == "__main__":
    main()
