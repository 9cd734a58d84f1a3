"""First minutes: what a user waits for before a model trains, beside Accelerate and Lightning.

    python -m bench.first_minutes [--json] [--steps 20] [--peers PYTHON]

Twenty steps of examples/gpt.py as a command whose output goes through a pipe, on two processes:

cold      the first time: nothing is kept of profiles, proofs and compiled loops
warm      the same once more
python    the author's own plain loop, in one process

cpu_s         seconds of the processor, all processes together
first_line_s  until the first line is there
step_line_s   until the first line about a step
wall_s        until the command has ended

`--peers` is the Python of an environment with accelerate and lightning; what is not installed there
is left out.  Every side has one thread a process.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.machine import machine

ROOT = Path(__file__).parent.parent
JOB = ROOT / "examples" / "gpt.py"
_STEP = re.compile(rb"step \d+")

_HEAD = """
import itertools, sys
sys.path[:0] = [{examples!r}, {source!r}]
import torch
torch.set_num_threads(1)
import gpt
job, steps = gpt.job(), {steps}
model = job.model()
optimizer = job.optimizer(model.parameters())
"""
PLAIN = (
    _HEAD
    + """
data = job.data(0)
for step in range(1, steps + 1):
    for _ in range(job.micro_batches):
        loss = job.loss(model, next(data)) / job.micro_batches
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, steps):
        print("step", step, float(loss) * job.micro_batches, flush=True)
"""
)
ACCELERATE = (
    _HEAD
    + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, optimizer)
rank, ranks = accelerator.process_index, accelerator.num_processes
data = itertools.islice(job.data(0), rank, None, ranks)
for step in range(1, steps + 1):
    for at in range(own := job.micro_batches // ranks):
        with accelerator.accumulate(model):
            loss = job.loss(model, next(data)) / own
            accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, steps) and rank == 0:
        print("step", step, float(loss) * own, flush=True)
"""
)
LIGHTNING = (
    _HEAD
    + """
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model
    def training_step(self, batch, index):
        loss = job.loss(self.model, batch)
        if index in (0, steps * own - 1) and self.global_rank == 0:
            print("step", self.global_step + 1, float(loss), flush=True)
        return loss
    def configure_optimizers(self):
        return job.optimizer(self.model.parameters())

class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return itertools.islice(job.data(0), rank, None, 2)

own = job.micro_batches // 2
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=steps,
                    accumulate_grad_batches=own, logger=False, enable_checkpointing=False,
                    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=None))
"""
)


class Took(NamedTuple):
    """What a command took; seconds."""

    cpu_s: float
    first_line_s: float | None
    step_line_s: float | None
    wall_s: float
    code: int


def took(command: Sequence[object], env: Mapping[str, str], folder: Path) -> Took:
    """Run a command with its output in a pipe; return what it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    first = step = None
    process = subprocess.Popen(
        [str(word) for word in command],
        env={**env},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None, "it is a pipe"
    for line in process.stdout:
        now = time.monotonic() - start
        first = now if first is None else first
        step = now if step is None and _STEP.match(line) else step
    code, wall = process.wait(), time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Took(cpu, first, step, wall, code)


def environment(cache: Path) -> dict[str, str]:
    """Return the shell's variables, nothing kept from before, one thread a process."""
    own = {"XDG_CACHE_HOME": str(cache), "NUMBA_CACHE_DIR": str(cache / "numba")}
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return {**os.environ, **own}


def has(python: Path, module: str) -> bool:
    """Return whether an environment has a module."""
    done = subprocess.run([python, "-c", f"import {module}"], capture_output=True)
    return done.returncode == 0


def sides(steps: int, peers: Path | None, folder: Path) -> Iterator[tuple[str, list[object]]]:
    """Yield each side with its command."""
    train = [sys.executable, "-m", "penstock", "train", JOB]
    yield "penstock", [*train, "--steps", steps, "--out", folder / "run"]
    values = {"examples": str(JOB.parent), "source": str(ROOT / "src"), "steps": steps}
    for name, text in (("python", PLAIN), ("accelerate", ACCELERATE), ("lightning", LIGHTNING)):
        (path := folder / f"{name}_side.py").write_text(text.format(**values))
        if name == "python":
            yield name, [sys.executable, path]
        elif peers is not None and has(peers, name):
            launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", 2]
            launch += ["--num_machines", 1, "--mixed_precision", "no", "--dynamo_backend", "no"]
            yield name, [peers, *(launch if name == "accelerate" else []), path]


def rows(steps: int, peers: Path | None) -> Iterator[dict[str, object]]:
    """Yield a row for each side, cold and warm."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = environment(folder / "cache")
        for side, command in sides(steps, peers, folder):
            for when in ("cold", "warm"):
                yield {"side": side, "when": when, **took(command, env, folder)._asdict()}


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = list[dict[str, object]]()
    for row in rows(asked.steps, asked.peers):
        found.append(row)
        if not asked.json:
            figures = (f"{k} {v:.2f}" if isinstance(v, float) else f"{v}" for k, v in row.items())
            print("  ".join(figures), flush=True)
    if asked.json:
        print(json.dumps({"machine": machine(), "rows": found}, indent=2))


if __name__ == "__main__":
    main()
