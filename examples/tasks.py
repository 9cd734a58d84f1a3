"""Preprocess, train, infer: tasks on machines that may be gone at any moment, by Dask.

    pip install "penstock[tasks]"
    python examples/tasks.py --out runs/tasks --deaths 0.5

Each task puts its output under a temporary name and links it to its own, which nobody can do twice:
a task that is done again finds its output and leaves it.  Training goes on from the last checkpoint
of whoever trained before.  A machine here is a Dask worker with all its processes; with `--deaths`
it is killed in the middle of a task, that often, and another one comes.

Source: "Hyper: Distributed cloud processing for large-scale deep learning tasks", arXiv:1910.07172.

Letters of tensor shapes: B samples, D numbers of a sample.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

import penstock as ps

PARTS, SAMPLES, D = 4, 256, 8
STEPS, EVERY = 60, 10  # of training, and between its checkpoints
MACHINES, MOST = 2, 4  # at a time; attempts of a task that may be killed
FOLDER = "PENSTOCK_TASKS"  # where the outputs are, told to the process that trains

Batch = dict[str, Tensor]


def raw(part: int) -> Batch:
    """Return samples as they were measured: no two numbers have the same scale."""
    generator = torch.Generator().manual_seed(part)
    x_BD = torch.randn(SAMPLES, D, generator=generator)
    y_B = (x_BD[:, 0] * x_BD[:, 1]).tanh() + 0.5 * x_BD[:, 2]
    return {"x": x_BD * 10 ** torch.linspace(-2, 2, D), "y": y_B}


# Training


def data(start: int) -> Iterator[Batch]:
    """Yield micro-batches of the preprocessed parts, one part after the other."""
    folder = Path(os.environ[FOLDER])
    parts = [torch.load(folder / f"preprocess-{part}.pt") for part in range(PARTS)]
    while True:
        part, half = parts[start // 2 % PARTS], slice(start % 2 * SAMPLES // 2, None)
        yield {name: value[half][: SAMPLES // 2] for name, value in part.items()}
        start += 1


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 32), nn.Tanh(), nn.Linear(32, 1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"])[:, 0] - batch["y"]).square().mean()


def job() -> ps.Job:
    return ps.Job(
        model=net,
        loss=loss,
        data=data,
        optimizer=lambda weights: Adam(weights, lr=1e-2),
        micro_batches=2,
        num_steps=STEPS,
    )


# Tasks


def preprocess(folder: Path, part: int) -> Batch:
    """Return samples whose numbers have one scale."""
    samples = raw(part)
    return {**samples, "x": samples["x"] / samples["x"].std(0)}


def train(folder: Path, part: int) -> dict[str, object]:
    """Train, or go on from what another machine has saved; return what the run tells of itself."""
    run = folder / "run"
    command = [sys.executable, "-m", "penstock", "train", __file__, "--out", str(run)]
    options = ["--ranks", "1", "--set", f"checkpoint_every={EVERY}", "--set", "eager=true"]
    if saved(folder):
        options.append("--resume")
    told = {**os.environ, FOLDER: str(folder)}
    subprocess.run([*command, *options], check=True, env=told, stdout=subprocess.DEVNULL)
    return json.loads((run / "summary.json").read_text())


def infer(folder: Path, part: int) -> Tensor:
    """Return what the trained net says of a part."""
    model = net()
    ps.load_weights(model, folder / "run")
    with torch.no_grad():
        return model(preprocess(folder, part)["x"])[:, 0]


WORK: dict[str, Callable[[Path, int], object]] = {
    "preprocess": preprocess,
    "train": train,
    "infer": infer,
}


def saved(folder: Path) -> list[str]:
    """Return the names of the checkpoints that are whole."""
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def done(name: str, folder: Path, deaths: float, after: list[str]) -> str:
    """Do a task unless it is done; return its name.

    after:  names of the tasks whose outputs it reads.
    """
    out, (kind, _, part) = folder / f"{name}.pt", name.partition("-")
    if out.exists():
        return name
    dies = Deaths(folder, name, deaths)
    dies.here("begun")
    if kind == "train":
        threading.Thread(target=dies.once_saved, daemon=True).start()
    output = WORK[kind](folder, int(part or 0))
    temporary = folder / f".{name}.{os.getpid()}"
    torch.save(output, temporary)
    dies.here("written")
    link_once(temporary, out)
    dies.here("published")
    return name


def link_once(temporary: Path, out: Path) -> None:
    """Give a file its name, unless another one has it."""
    with suppress(FileExistsError):
        os.link(temporary, out)
    temporary.unlink()


class Deaths:
    """Where a machine is killed in an attempt at a task: the same for the same seed.

    It is known by what the attempts leave: a line in `attempts.txt` each.
    """

    PLACES = "begun", "written", "published"

    def __init__(self, folder: Path, name: str, share: float) -> None:
        self.folder, self.name = folder, name
        with (folder / "attempts.txt").open("a") as file:
            file.write(f"{name}\n")
        attempts = (folder / "attempts.txt").read_text().split().count(name)
        drawn = random.Random(f"{name} {attempts}")
        dies = drawn.random() < share and attempts <= MOST
        self.place = drawn.choice(self.PLACES) if dies else ""
        self.known = saved(folder)

    def here(self, place: str) -> None:
        if place == self.place and self.name != "train":
            self.die(place)

    def once_saved(self) -> None:
        """Kill the machine that trains once it has saved something that was not there before."""
        while self.place:
            if saved(self.folder)[-1:] != self.known[-1:]:
                self.die("saved")
            time.sleep(0.05)

    def die(self, place: str) -> None:
        with (self.folder / "deaths.txt").open("a") as file:
            file.write(f"{self.name} {place}\n")
        os.killpg(os.getpgrp(), signal.SIGKILL)


# Machines


def machine(address: str) -> subprocess.Popen[bytes]:
    """Start a machine: a worker with a group of processes of its own."""
    module = [sys.executable, "-m", "dask", "worker", address, "--no-nanny", "--nthreads", "1"]
    return subprocess.Popen(
        [*module, "--no-dashboard"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def kept_up(address: str, ended: threading.Event) -> None:
    """Have so many machines until the end: for each that is gone another one comes."""
    machines = [machine(address) for _ in range(MACHINES)]
    while not ended.wait(0.1):
        machines = [each if each.poll() is None else machine(address) for each in machines]
    for each in machines:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)
        each.wait()


def run_all(folder: Path, deaths: float) -> None:
    """Do all tasks on machines that come and go."""
    dask, engine = import_module("dask"), import_module("distributed")
    dask.config.set({"distributed.scheduler.allowed-failures": 10**6})  # of machines, at a task
    ended = threading.Event()
    cluster = engine.LocalCluster(n_workers=0, dashboard_address=None)
    with cluster as here, engine.Client(here) as client:
        keeper = threading.Thread(target=kept_up, args=(here.scheduler_address, ended))
        keeper.start()
        own: dict[str, Any] = {"folder": folder, "deaths": deaths}
        try:
            names = [f"preprocess-{part}" for part in range(PARTS)]
            parts = [client.submit(done, name=n, after=[], key=n, **own) for n in names]
            trained = client.submit(done, name="train", after=parts, key="train", **own)
            names = [f"infer-{part}" for part in range(PARTS)]
            last = [client.submit(done, name=n, after=[trained], key=n, **own) for n in names]
            client.gather(last)
        finally:
            ended.set()
            keeper.join()


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def main() -> None:
    """Do all tasks, and print what came of them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/tasks"))
    parser.add_argument("--deaths", type=float, default=0.0, help="share of attempts to kill")
    options = parser.parse_args()
    folder = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    run_all(folder, options.deaths)
    for left in folder.glob(".*"):  # by machines that were killed
        left.unlink()
    attempts, killed = (lines_of(folder / f"{name}.txt") for name in ("attempts", "deaths"))
    told = [torch.load(folder / f"infer-{part}.pt") for part in range(PARTS)]
    off = [(told[part] - raw(part)["y"]).square().mean() for part in range(PARTS)]
    counts = f"{len(attempts)} attempts at {2 * PARTS + 1} tasks, {len(killed)} machines killed"
    print(f"{counts}; {float(sum(off)) / PARTS:.4f} off")
    for line in killed:
        print(f"  killed: {line}")


if __name__ == "__main__":
    main()
