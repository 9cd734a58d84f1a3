"""Eager: plain data parallelism for a model that cannot be traced.

Every rank holds the whole module, runs its share of the micro-batches through autograd, and
sums gradients over all ranks.  No plan, no prediction; checkpoints have the same format.
"""

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from penstock.errors import JobError, RunError
from penstock.graph.trace import loss_of
from penstock.job import Job
from penstock.runtime import checkpoint
from penstock.graph.code import SeededRandom, micro_batch_seed
from penstock.runtime.rank import StepResult
from penstock.runtime.transport import Transport
from penstock.runtime.weights import load_optimizer_state, optimizer_state
from penstock.runtime.worker import RankResult, Report
from penstock.timeline import Lane, Span, SpanKind


@dataclass(frozen=True, slots=True, eq=False)
class EagerTask:
    """What every rank of an eager data-parallel run has to do."""

    job: Job
    first_step: int
    num_steps: int
    checkpoints: Path | None = None
    checkpoint_every: int = 0
    resume: Path | None = None


def replicas_of(job: Job, most: int) -> int:
    """Return the greatest number of ranks that share the job's micro-batches evenly."""
    return max(n for n in range(1, most + 1) if job.micro_batches % n == 0)


def work_eagerly(task: EagerTask, transport: Transport, report: Report) -> RankResult:
    """Train as one of `transport.num_ranks` replicas and return what was measured."""
    rank = _EagerRank(task, transport)
    everyone = tuple(range(transport.num_ranks))
    spans: tuple[Span, ...] = ()
    seconds: list[float] = []
    for step in range(task.first_step, task.first_step + task.num_steps):
        start = time.perf_counter()
        loss, spans = rank.step(step, everyone)
        seconds.append(time.perf_counter() - start)
        report(StepResult(step, loss, seconds[-1]))
        done = step + 1
        last = done == task.first_step + task.num_steps
        if task.checkpoints and (last or task.checkpoint_every and done % task.checkpoint_every == 0):
            rank.save(task.checkpoints, done)
    answers = transport.all_gather_bytes(json.dumps(seconds).encode(), everyone)
    slowest = [max(row) for row in zip(*map(json.loads, answers), strict=True)]
    typical = statistics.median(slowest[min(2, len(slowest) - 1) :])
    return RankResult(transport.rank, spans, (), 0, tuple(seconds), typical, {})


class _EagerRank:
    """One replica: the module, its optimizer and its place in the data."""

    def __init__(self, task: EagerTask, transport: Transport) -> None:
        self.job, self.transport = task.job, transport
        torch.manual_seed(task.job.seed)
        self.model = task.job.model()
        self.parameters = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise JobError("the model has no trainable parameter", hint="unfreeze some")
        self.optimizer = task.job.optimizer(list(self.parameters.values()))
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.share = task.job.micro_batches // transport.num_ranks
        if task.resume is not None:
            self._load(checkpoint.load(task.resume))

    def step(self, step: int, everyone: tuple[int, ...]) -> tuple[float, tuple[Span, ...]]:
        """Return the mean loss of this rank's micro-batches, and its spans."""
        first = step * self.job.micro_batches + self.transport.rank * self.share
        data = self.job.data(first)
        self.optimizer.zero_grad()
        losses: list[float] = []
        spans: list[Span] = []
        origin = time.perf_counter()
        for number in range(self.share):
            start = time.perf_counter()
            losses.append(self._micro_batch(data, first + number))
            spans.append(self._span("compute", "B", number, start - origin, origin))
        start = time.perf_counter()
        self._reduce(everyone)
        spans.append(self._span("collective", "reduce", 0, start - origin, origin))
        self._update(step)
        return statistics.fmean(losses), tuple(spans)

    def _micro_batch(self, data: Iterator[Any], index: int) -> float:
        batch = next(data, None)
        if batch is None:
            raise RunError(f"the job's data ended at micro-batch {index}", hint="train fewer steps")
        with SeededRandom(micro_batch_seed(self.job.seed, index)):
            loss = loss_of(self.job, self.model, batch)
            (loss / self.job.micro_batches).backward()
        return float(loss.detach())

    def _span(
        self, lane: Lane, kind: SpanKind, micro_batch: int, start_s: float, origin: float
    ) -> Span:
        end_s = time.perf_counter() - origin
        return Span(self.transport.rank, lane, kind, 0, micro_batch, start_s, end_s)

    def _reduce(self, everyone: tuple[int, ...]) -> None:
        if len(everyone) == 1:
            return
        for parameter in self.parameters.values():
            if parameter.grad is None:  # used on another rank, perhaps
                parameter.grad = torch.zeros_like(parameter)
            self.transport.all_reduce(parameter.grad, everyone)

    def _update(self, step: int) -> None:
        if self.job.clip_norm is not None:
            clip_grad_norm_(self.parameters.values(), self.job.clip_norm)
        if self.job.learning_rate is not None:
            factor = float(self.job.learning_rate(step))
            for group, base in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = base * factor
        self.optimizer.step()

    def save(self, checkpoints: Path, step: int) -> None:
        everyone = tuple(range(self.transport.num_ranks))
        if self.transport.rank == 0:
            tensors: dict[str, Tensor] = {f"weights/{n}": p for n, p in self.model.named_parameters()}
            tensors |= {f"buffers/{n}": b for n, b in self.model.named_buffers()}
            plain: dict[str, object] = {}
            for name, parameter in self.parameters.items():
                optimizer_state(self.optimizer, name, parameter, tensors, plain)
            checkpoint.write_part(checkpoints, step, 0, tensors, plain)
            checkpoint.finish(checkpoints, step)
            checkpoint.keep_newest(checkpoints)
        self.transport.all_gather_bytes(b"named", everyone)

    def _load(self, state: checkpoint.Checkpoint) -> None:
        load_model(self.model, state.tensors)
        for name, parameter in self.parameters.items():
            load_optimizer_state(self.optimizer, name, parameter, state.tensors, state.plain)


def load_model(model: nn.Module, tensors: Any) -> None:
    """Copy "weights/NAME" and "buffers/NAME" into a module."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(tensors[f"weights/{name}"])
        for name, value in model.named_buffers():
            value.copy_(tensors[f"buffers/{name}"])
