"""Learned: what each way to agree does to a model that is trained on handwritten digits.

    python -m bench.agree --learned [--json] [--seeds 5] [--steps 200] [--ranks 2]

The 1,797 digits of scikit-learn, each fifth held out; 64-128-10, SGD, one micro-batch of 32 a rank
and step.  Every way trains the same number of samples, by ranks that are processes of this host,
from the same weights for one seed: seeds choose the weights and the order of samples.

way, topology          as `sums` and `topology` say it
samples                whose gradients are computed; dropped ones of backup workers included
loss, loss_spread      of the held-out digits at the end: mean over the seeds, standard deviation
accuracy, accuracy_spread   likewise, the share that is told right
step_ms, predicted_step_ms  median over the seeds of what a step takes, and by the simulator from
                       ops measured here; of a served way from step to step of the fastest rank
sent_bytes             of all ranks together in a step, by the formulas of docs/agree.md, without
                       heads
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.agree import AS_THEY_COME, WAYS, bytes_of_a_step
from bench.beside import cluster_of
from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.runtime.calls import StepResult
from penstock.runtime.launch import Launcher, run_processes
from penstock.runtime.run import windows_of
from penstock.runtime.worker import Task, work
from penstock.search import evaluate
from penstock.sums import sums_way

EVERY: tuple[tuple[str | None, str | None], ...] = (
    *((way, None) for way in WAYS),
    *((way, None) for way in AS_THEY_COME),
    ("ssp:2", "server:2"),
)
BATCH = 32
Row = dict[str, Any]


class Digits(NamedTuple):
    """Pictures and what they are: to train on, and held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@cache
def digits() -> Digits:
    from sklearn.datasets import load_digits  # pyright: ignore - no types

    x, y = load_digits(return_X_y=True)  # pyright: ignore - no types
    pictures = torch.tensor(np.asarray(x), dtype=torch.float32) / 16
    kinds = torch.tensor(np.asarray(y), dtype=torch.int64)
    is_held = torch.arange(len(kinds)) % 5 == 0
    return Digits(pictures[~is_held], kinds[~is_held], pictures[is_held], kinds[is_held])


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batches(seed: int, start: int) -> Iterator[dict[str, Tensor]]:
    """Yield micro-batches: each pass over the digits in an order of its own."""
    own, each = digits(), len(digits().y) // BATCH
    while True:
        of, at = divmod(start, each)
        drawn = torch.Generator().manual_seed(1000 * seed + of)
        rows = torch.randperm(len(own.y), generator=drawn)[at * BATCH : (at + 1) * BATCH]
        yield {"x": own.x[rows], "y": own.y[rows]}
        start += 1


def job_of(way: str | None, ranks: int, seed: int) -> Job:
    return Job(
        model=network,
        loss=loss,
        data=partial(batches, seed),
        optimizer=lambda weights: torch.optim.SGD(weights, lr=0.2),
        micro_batches=ranks,
        sums=way,
        seed=seed,
    )


def plan_of(captured: Capture, way: str | None, topology: str | None, ranks: int) -> Plan:
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=1, replicas=ranks)
    return plan.changed(sums=way, topology=topology)


class Trained(NamedTuple):
    """What came of one run."""

    loss: float
    accuracy: float
    step_s: float


def trained(
    way: str | None, topology: str | None, ranks: int, steps: int, seed: int, launcher: Launcher
) -> Trained:
    """Train once, and look at the digits that were held out."""
    job, heard = job_of(way, ranks, seed), list[tuple[float, int]]()
    captured = capture(job)
    plan = plan_of(captured, way, topology, ranks)

    def tell(result: StepResult) -> None:
        heard.append((time.perf_counter(), result.step))

    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    with tempfile.TemporaryDirectory() as folder:
        policy = SavePolicy(Path(folder))
        task = Task(captured, stages, job, windows_of(program, steps), policy=policy)
        launcher(partial(work, task), ranks, tell, groups=task.groups)
        newest = checkpoint.latest(Path(folder))
        assert newest is not None, "a run ends with a checkpoint"
        weights = checkpoint.load(newest).tensors
    model, own = network(), digits()
    names = model.state_dict().keys()
    model.load_state_dict({name: weights[f"weights/{name}"] for name in names})
    with torch.no_grad():
        found = model(own.held_x)
    accuracy = float((found.argmax(1) == own.held_y).float().mean())
    return Trained(float(F.cross_entropy(found, own.held_y)), accuracy, _step_s(heard))


def _step_s(heard: list[tuple[float, int]]) -> float:
    """Return the seconds from step to step, once a quarter of the steps is over."""
    first = {step: at_s for at_s, step in reversed(heard)}
    ends = [first[step] for step in sorted(first)]
    begun = len(ends) // 4
    return (ends[-1] - ends[begun]) / max(1, len(ends) - 1 - begun)


def predicted_s(plan: Plan, captured: Capture, profile: Profile, ranks: int) -> float:
    cluster = cluster_of(ranks, float("inf"))
    kind = replace(profile, kind=cluster.devices[0].name)
    return evaluate(captured.graph, kind, cluster, plan)[0].step_s


def sent_bytes(plan: Plan, captured: Capture) -> int:
    """Return what all ranks send in a step: 2 (n - 1) S of each sum, as gradients and answers."""
    reductions = lower_plan(plan, captured.graph).code.reductions
    return int(2 * (plan.total_ranks - 1) * sum(map(bytes_of_a_step, reductions)))


def rows(
    ranks: int,
    seeds: int,
    steps: int,
    ways: tuple[tuple[str | None, str | None], ...] = EVERY,
    launcher: Launcher = run_processes,
) -> Iterator[Row]:
    captured = capture(job_of(None, ranks, 0))
    profile = measure(captured, job_of(None, ranks, 0), beside=1)
    for way, topology in ways:
        plan = plan_of(captured, way, topology, ranks)
        own = (way, topology, ranks, steps)
        found = [trained(*own, seed, launcher) for seed in range(seeds)]
        losses, right, seconds = zip(*found, strict=True)
        yield {
            "way": str(way),
            "topology": topology or ("server" if sums_way(way).served else ""),
            "ranks": ranks,
            "samples": ranks * BATCH * steps,
            "loss": statistics.fmean(losses),
            "loss_spread": _spread(losses),
            "accuracy": statistics.fmean(right),
            "accuracy_spread": _spread(right),
            "step_ms": 1e3 * statistics.median(seconds),
            "predicted_step_ms": 1e3 * predicted_s(plan, captured, profile, ranks),
            "sent_bytes": sent_bytes(plan, captured),
        }


def _spread(values: tuple[float, ...]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0
