"""Check: the cut, scheduled step against the plain one, gradient by gradient.

Synchronous schedules: loss, every gradient and every buffer after one step, against eager
autograd on the uncut model.  Asynchronous ones: the weights after some steps, against the
sequential definition that the schedule's weight rule states.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.graph.trace import Capture, build, loss_of, on_device
from penstock.job import Job
from penstock.plan import Plan
from penstock.program.lower_plan import is_asynchronous, lower_plan, schedule_of, stages_of, trains
from penstock.runtime.launch import run_threads
from penstock.runtime.rank import Rank
from penstock.runtime.run import Steps
from penstock.runtime.sequential import sequential
from penstock.runtime.transport import Transport
from penstock.runtime.worker import RankResult, Report, Task

_STEPS = 4  # of an asynchronous schedule


@dataclass(frozen=True, slots=True)
class Difference:
    """The greatest relative difference of one group of tensors, and where it is.

    Of two tensors: max |a - b| / max |b|, or max |a - b| where b is zero.
    """

    what: str
    where: str
    value: float
    bitwise: bool


def check(plan: Plan, capture: Capture, job: Job) -> tuple[Difference, ...]:
    """Return how the planned step differs from the plain one: loss, gradients, buffers.

    A schedule without a backward: loss and buffers of the plain forward pass.
    Runs every rank as a thread of this process, in the plan's order, on the job's first batches.
    Gradients are those the optimizer is given; clipped if the plan clips.  Buffers are compared
    where each stage lives on one rank, which sees every micro-batch.
    Weights are compared after SGD with momentum, not after the job's optimizer: one that divides
    by the size of the gradient, like Adam, would turn the last bit of a zero into a whole step.
    Raises:   RunError: a rank failed.
    """
    steps = _STEPS if is_asynchronous(plan) else 1
    job = replace(job, clip_norm=job.clip_norm if plan.clip else None)
    if steps > 1:
        job = replace(job, optimizer=_sgd, learning_rate=None)
    stages = stages_of(plan, capture.graph)
    program = lower_plan(plan, capture.graph, num_steps=steps)
    found: dict[str, Tensor] = {}
    told = Steps(plan.num_micro_batches * plan.replicas)
    task = Task(capture, stages, job, ((program, 0),), plan.replicas)
    run_threads(partial(_work, task, found), program.num_ranks, told.add)
    if steps == 1:
        count = plan.num_micro_batches * plan.replicas
        expected = plain_step(job, count, backward=trains(plan.schedule))
        found["loss/mean"] = _number(told.finished[0].loss)
    else:
        expected = sequential(job, program, steps, stages, capture.graph)
    several = any(len(ranks) > 1 for ranks in schedule_of(plan).stage_ranks)
    if plan.replicas > 1 or several:
        expected = {k: v for k, v in expected.items() if not k.startswith("buffers/")}
    return tuple(_compare(group, found, expected) for group in _groups(expected))


def _sgd(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _number(value: float | None) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def _work(task: Task, found: dict[str, Tensor], transport: Transport, report: Report) -> RankResult:
    """Run one window and put what is to be compared into `found`."""
    rank = Rank(task.capture, task.stages, task.job, transport, task.replicas, report=report)
    ((program, _),) = task.windows
    calls = rank.bind(program)
    transport.barrier()
    with torch.no_grad():
        rank.run(calls, 0)
        rank.settle()
    for held in rank.weights.values() if rank.replica == 0 else ():
        if program.num_steps > 1:
            found |= {f"weights/{held.names[n]}": v for n, v in held.tensors(0).items()}
        else:
            reached = [n for n, parameter in held.live.items() if parameter.grad is not None]
            found |= {f"gradients/{held.names[n]}": held.gradients[n] for n in reached}
        found |= {f"buffers/{held.buffer_names[n]}": v for n, v in held.buffers.items()}
    return RankResult(transport.rank, (), (), 0, (0.0,), 0.0, {})


def plain_step(job: Job, micro_batches: int, *, backward: bool = True) -> dict[str, Tensor]:
    """Return loss, gradients and buffers of one step of the uncut model under eager autograd."""
    model, _ = build(job)
    data = job.data(0)
    losses: list[Tensor] = []
    for index in range(micro_batches):
        batch = on_device(next(data))  # not under the mode: the data's random numbers are its own
        with SeededRandom(micro_batch_seed(job.seed, index)):
            loss = loss_of(job, model, batch)
            if backward:
                (loss / micro_batches).backward()  # pyright: ignore[reportUnknownMemberType]
        losses.append(loss.detach().double().reshape(()))
    if backward and job.clip_norm is not None:
        clip_grad_norm_(model.parameters(), job.clip_norm)
    expected = {f"gradients/{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    expected |= {f"buffers/{name}": value for name, value in model.named_buffers()}
    return {"loss/mean": _number(float(torch.stack(losses).mean())), **expected}


def _groups(expected: Mapping[str, Tensor]) -> list[str]:
    return list(dict.fromkeys(key.split("/", 1)[0] for key in expected))


def _compare(group: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Difference:
    worst, where, bitwise = 0.0, "", True
    for key, right in expected.items():
        if not key.startswith(f"{group}/"):
            continue
        if key not in found:
            return Difference(group, key, math.inf, bitwise=False)
        left = found[key].reshape(right.shape)
        if ((left == right) | (left.isnan() & right.isnan())).all():
            continue
        bitwise = False
        apart = float((left.double() - right.double()).abs().max())
        scale = float(right.double().abs().max())
        value = apart / scale if scale > 0 else apart
        value = math.inf if math.isnan(value) else value  # only one of them is no number
        if value > worst:
            worst, where = value, key
    return Difference(group, where, worst, bitwise)
