"""Training by a plan, as `penstock train` does it, and what it is compared with."""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy, Saver, State
from penstock.graph.trace import Capture, build
from penstock.job import Job
from penstock.plan import Plan, is_asynchronous
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.program.program import Program
from penstock.runtime.launch import Launcher, run_threads
from penstock.runtime.run import Outcome, Steps, outcome_of
from penstock.runtime.windows import Windows
from penstock.runtime.worker import Task, work


class Run(NamedTuple):
    """A plan, the job to train by it, and the job's traced step."""

    plan: Plan
    job: Job
    captured: Capture


def windows(run: Run, lengths: Iterable[int]) -> tuple[tuple[Program, int], ...]:
    """Return windows of so many steps; a synchronous program has one step, whatever they say."""
    if not is_asynchronous(run.plan):
        lengths = [1] * sum(lengths)
    lengths = tuple(lengths)
    graph, plan = run.captured.graph, run.plan
    stages = stages_of(plan, graph)
    made = {n: lower_plan(plan, graph, num_steps=n, stages=stages) for n in set(lengths)}
    starts = accumulate(lengths, initial=0)
    return tuple((made[length], step) for length, step in zip(lengths, starts, strict=False))


def listed(windows: Sequence[tuple[Program, int]]) -> Windows:
    """Return windows that are written down: programs with their first steps."""
    by_step = {step: program for program, step in windows}
    programs = {id(program): program for program, _ in windows}
    return Windows(min(by_step, default=0), by_step.get, tuple(programs.values()))


def train(
    run: Run,
    folder: Path,
    lengths: Sequence[int] = (3,),
    launcher: Launcher = run_threads,
    every: int = 0,
    every_s: float | None = None,
    **options: object,
) -> Outcome:
    """Train windows of `lengths` steps; checkpoints go to `folder`, one `every` so many steps."""
    graph, plan = run.captured.graph, run.plan
    parts = options.pop("windows", None) or windows(run, lengths)
    task = Task(
        run.captured,
        stages_of(plan, graph),
        run.job,
        parts if isinstance(parts, Windows) else listed(parts),
        policy=SavePolicy(folder, every, every_s=every_s),
        **options,
    )
    steps = Steps(plan.step_micro_batches)
    results = launcher(partial(work, task), plan.total_ranks, steps.add, groups=task.groups)
    newest = checkpoint.latest(folder)
    assert newest is not None
    return outcome_of(results, steps, checkpoint.load(newest).tensors)


def delayed_loop(job: Job, num_steps: int, micro_batches: int) -> dict[str, Tensor]:
    """Return the weights by W(t+1) = update(W(t), gradient at W(t-1)), on the uncut model."""
    model, _ = build(job)
    older = deepcopy(model)
    optimizer, batches = job.optimizer(model.parameters()), job.data(0)
    for _ in range(num_steps):
        loss = sum(job.loss(older, next(batches)) for _ in range(micro_batches)) / micro_batches
        gradients = torch.autograd.grad(loss, list(older.parameters()))
        older.load_state_dict(model.state_dict())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {f"weights/{name}": value.detach() for name, value in model.named_parameters()}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    """Return the keys whose tensors are not bit for bit those expected."""
    return [key for key, value in expected.items() if not torch.equal(found[key], value)]


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the greatest difference, of each tensor relative to its greatest number."""
    pairs = [(found[key].double(), value.double()) for key, value in expected.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def steps_saved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that will hold the steps after which ranks of this process save."""
    made, save = list[int](), Saver.save

    def noted(saver: Saver, step: int, state: State | None, *, waits: bool) -> None:
        if saver.transport.rank == 0:
            made.append(step)
        save(saver, step, state, waits=waits)

    monkeypatch.setattr(Saver, "save", noted)
    return made
