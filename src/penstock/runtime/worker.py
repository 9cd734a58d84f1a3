"""Worker: the life of one rank, the same in a thread, a forked process and under torchrun."""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock import _compat
from penstock._compat import MemoryEvent
from penstock.errors import RunError
from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment, Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.program.program import Program
from penstock.runtime import checkpoint
from penstock.runtime.rank import Bound, Rank, StepResult
from penstock.runtime.transport import Transport
from penstock.timeline import Held, Span

Report = Callable[[StepResult], None]
_WINDOWS_KEPT = 32  # whose marks are kept, to choose a typical one from


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What every rank of a run has to do.

    windows:           (program, first step) in order.
    checkpoints:       folder for checkpoints, or None; one every `checkpoint_every` steps and
                       at the end.
    resume:            checkpoint to start from.
    function_of:       makes a segment's function; another one emulates it.
    memory_window:     number of the window that is run under the memory profiler, or None.
    """

    capture: Capture
    stages: Stages
    job: Job
    windows: tuple[tuple[Program, int], ...]
    replicas: int = 1
    checkpoints: Path | None = None
    checkpoint_every: int = 0
    resume: Path | None = None
    memory_window: int | None = None
    function_of: Callable[[Segment, Capture], Function] = function_of


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank measured: the spans of a typical window, its seconds, the bytes held."""

    rank: int
    spans: tuple[Span, ...]
    memory: tuple[Held, ...]
    peak_bytes: int
    window_s: tuple[float, ...]
    typical_s: float
    versions: dict[int, int]


def work(task: Task, transport: Transport, report: Report) -> RankResult:
    """Run all windows of `task` as rank `transport.rank` and return what was measured."""
    rank = Rank(
        task.capture, task.stages, task.job, transport, task.replicas, make=task.function_of
    )
    bound = {id(program): rank.bind(program) for program, _ in task.windows}
    if task.resume is not None:
        state = checkpoint.load(task.resume)
        for weights in rank.weights.values():
            weights.load(state.tensors, state.plain)
    transport.barrier()
    everyone = tuple(range(transport.num_ranks))
    _agree(task, transport, everyone)
    watch = _Watch(rank)
    with torch.no_grad():
        for number, (program, first_step) in enumerate(task.windows):
            calls = bound[id(program)]
            watch.window(calls, first_step, program.num_steps, number == task.memory_window)
            for result in rank.progress.done:
                report(result)
            rank.progress.done.clear()
            last = number == len(task.windows) - 1
            if task.checkpoints is not None:
                _save_when_due(task, rank, first_step + program.num_steps, last, everyone)
    return watch.result(everyone)


def _agree(task: Task, transport: Transport, everyone: tuple[int, ...]) -> None:
    """Raise unless all ranks traced the same graph."""
    own = task.capture.graph.digest
    digests = [d.decode() for d in transport.all_gather_bytes(own.encode(), everyone)]
    if set(digests) != {own}:
        listed = ", ".join(f"rank {r}: {d}" for r, d in enumerate(digests))
        hint = "do all ranks run the same job file with the same library versions?"
        raise RunError(f"ranks traced different graphs: {listed}", hint=hint)


def _save_when_due(
    task: Task, rank: Rank, step: int, last: bool, everyone: tuple[int, ...]
) -> None:
    every = task.checkpoint_every
    if not last and (not every or step % every):
        return
    assert task.checkpoints is not None
    if rank.replica == 0:
        tensors: dict[str, torch.Tensor] = {}
        plain: dict[str, object] = {}
        for weights in rank.weights.values():
            more, values = weights.state()
            tensors |= more
            plain |= values
        checkpoint.write_part(task.checkpoints, step, rank.rank, tensors, plain)
    rank.transport.all_gather_bytes(b"written", everyone)
    if rank.rank == 0:
        checkpoint.finish(task.checkpoints, step)
        checkpoint.keep_newest(task.checkpoints)
    rank.transport.all_gather_bytes(b"named", everyone)


class _Watch:
    """Runs windows and remembers enough of them to show a typical one."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.kept: list[tuple[Sequence[Bound], list[float], int]] = []
        self.window_s: list[float] = []
        self.memory: tuple[Held, ...] = ()
        self.peak_bytes = 0

    def window(self, calls: list[Bound], first_step: int, num_steps: int, profiled: bool) -> None:
        if profiled:
            with _compat.memory_profile() as memory:
                marks = self.rank.run(calls, first_step)
            self.memory = _held(self.rank, memory(), self.rank.held_bytes())
            self.peak_bytes = max((held.size_bytes for held in self.memory), default=0)
            if self.kept:
                return
        else:
            marks = self.rank.run(calls, first_step)
        self.kept.append((calls, marks, num_steps))
        self.window_s.append((marks[-1] - marks[0]) / num_steps)
        if len(self.kept) > _WINDOWS_KEPT:
            self.kept.pop(0)

    def result(self, everyone: tuple[int, ...]) -> RankResult:
        rank = self.rank
        lengths = [(m[-1] - m[0]) / n for _, m, n in self.kept]
        answers = rank.transport.all_gather_bytes(json.dumps(lengths).encode(), everyone)
        slowest = [max(row) for row in zip(*map(json.loads, answers), strict=True)]
        settled = slowest[min(2, len(slowest) - 1) :]
        typical = statistics.median_low(settled)
        calls, marks, _ = self.kept[slowest.index(typical)]
        starts = rank.transport.all_gather_bytes(json.dumps(marks[0]).encode(), everyone)
        origin = min(map(json.loads, starts))
        return RankResult(
            rank=rank.rank,
            spans=tuple(rank.spans(calls, marks, origin)),
            memory=self.memory,
            peak_bytes=self.peak_bytes,
            window_s=tuple(self.window_s),
            typical_s=typical,
            versions={stage: 1 + len(w.stash) for stage, w in rank.weights.items()},
        )


def _held(rank: Rank, events: Sequence[MemoryEvent], held_after: int) -> tuple[Held, ...]:
    """Return the bytes held over a profiled window: the profiler's changes on top of what stays."""
    if not events:
        return ()
    now = held_after - sum(event.size_bytes for event in events)
    curve = [Held(rank.rank, 0.0, now)]
    for event in events:
        now += event.size_bytes
        curve.append(Held(rank.rank, event.time_s - events[0].time_s, now))
    return tuple(curve)
