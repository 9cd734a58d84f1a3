"""Run: a Program on real ranks; returns the measured Timeline.

run(program, ..., num_steps=100)                one thread per rank, in this process
run(program, ..., launcher=run_processes)       forked processes of this host
"""

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy, Saves
from penstock.errors import RunError
from penstock.graph.code import function_of
from penstock.graph.stages import Stages
from penstock.graph.trace import Capture
from penstock.job import Job
from penstock.profile.noise import NoiseTold
from penstock.profile.profile import Profile
from penstock.program.program import Program
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import Launcher, run_threads
from penstock.runtime.rank import StepResult
from penstock.runtime.sampler import Samples
from penstock.runtime.windows import Windows, repeated
from penstock.runtime.worker import RankResult, Report, Task, work
from penstock.timeline.breakdown import Breakdown
from penstock.timeline.spent import breakdown_of_ranks
from penstock.timeline.svg import picture_of
from penstock.timeline.timeline import Timeline
from penstock.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a run gave: the timeline of a typical window and of memory, and every step.

    step_s:         median seconds per step, the first two windows left out.
    weights:        tensors of the final state by key ("weights/NAME", "buffers/NAME", ...).
    live_versions:  for each stage, how many versions of its weights were held.
    breakdown:      where the wall time went, on each rank; None where a rank cannot tell (a GPU).
    samples:        what sampled windows told of the actions of each rank; empty where likewise.
    noise:          squares of gradients in the steps that each rank has watched.
    saves:          what each rank's checkpoints took that were written while it trained on.
    held:           bytes of each rank between windows by what they are for, where it says so.
    joules:         that the machine took for a step; None where it does not tell.
    """

    timeline: Timeline
    steps: tuple[StepResult, ...]
    step_s: float
    peak_bytes: tuple[int, ...]
    weights: Mapping[str, Tensor]
    live_versions: tuple[int, ...]
    breakdown: Breakdown | None = None
    samples: tuple[Samples, ...] = ()
    saves: tuple[Saves, ...] = ()
    noise: tuple[NoiseTold, ...] = ()
    held: tuple[Mapping[str, int], ...] = ()
    joules: float | None = None

    def __repr__(self) -> str:
        return f"<Outcome: {self}>"

    def _repr_html_(self) -> str:
        """Return the picture of a measured step and the line for a notebook."""
        return picture_of(self.timeline, str(self))

    def __str__(self) -> str:
        """Return one line: "20 steps, 232 ms each, loss 4.1234, peak 107 MiB"."""
        loss = self.steps[-1].loss if self.steps else None
        words = [f"{len(self.steps):,} steps", f"{format_seconds(self.step_s)} each"]
        words += [] if self.joules is None else [f"{self.joules:.3g} J"]
        words += [] if loss is None else [f"loss {loss:.4f}"]
        words += [f"peak {format_bytes(max(self.peak_bytes))}"] if self.peak_bytes else []
        return ", ".join(words)


def windows_of(program: Program, num_steps: int, first_step: int = 0) -> Windows:
    """Return the windows that make up `num_steps` steps of `program`.

    Raises:   RunError: the window of the program does not divide the number of steps.
    """
    window = program.num_steps
    if num_steps < 1 or num_steps % window:
        hint = f"take a multiple of {window}, or a schedule with another window"
        raise RunError(f"{num_steps} steps cannot be run in windows of {window}", hint=hint)
    return repeated(program, range(first_step, first_step + num_steps))


def run(  # noqa: PLR0913 - what a run is made of
    program: Program,
    capture: Capture,
    stages: Stages,
    job: Job,
    *,
    num_steps: int,
    launcher: Launcher = run_threads,
    emulate: Profile | None = None,
    compiled: bool = False,
) -> Outcome:
    """Run `num_steps` steps and return what happened, the final weights included.

    compiled: whether functions are compiled where they can be, as a plan says.
    emulate:  sleep for the seconds of this profile instead of computing (see emulate.py).

    Raises:   RunError: a rank failed; the message is that rank's error.
              PlanError: a buffer has to see all micro-batches in order, and would not.
    """
    windows = windows_of(program, num_steps)
    job, make = (job, function_of) if emulate is None else sleeping(job, emulate)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        task = Task(
            capture=capture,
            stages=stages,
            job=job,
            windows=windows,
            policy=SavePolicy(Path(folder)),
            memory_window=None if launcher is run_threads else windows.count(2) - 1,
            function_of=make,
            compiled=compiled and emulate is None,
        ).compile_ahead()
        steps = Steps(program.grid.step_micro_batches)
        results = launcher(partial(work, task), program.num_ranks, steps.add, groups=task.groups)
        newest = checkpoint.latest(Path(folder))
        assert newest is not None, "a run ends with a checkpoint"
        return outcome_of(results, steps, checkpoint.load(newest).tensors)


class Steps:
    """Collects what ranks report of steps; one is done when the losses of all `micro_batches` are.

    micro_batches:  of a step, over all replicas; 0: each report is of a whole step, of any number.
    awaits:         whether a step is done only when its validation is told too.
    """

    def __init__(
        self,
        micro_batches: int,
        done: Report | None = None,
        awaits: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self.micro_batches, self.done, self.awaits = micro_batches, done, awaits
        self.waiting: dict[int, list[StepResult]] = {}
        self.finished: list[StepResult] = []

    def add(self, result: StepResult) -> None:
        """Take one rank's report; only those with a loss, or of a validation, count."""
        if result.loss is None and result.validated is None and not result.left_out:
            return
        told = self.waiting.setdefault(result.step, [])
        told.append(result)
        if self.is_run(result.step) and (
            not self.awaits(result.step) or any(r.validated is not None for r in told)
        ):
            self._finish(result.step)

    def is_run(self, step: int) -> bool:
        """Return whether the losses of a step that is not done are all there."""
        told = [r for r in self.waiting[step] if r.loss is not None or r.left_out]
        count = sum(r.micro_batches for r in told)
        return math.isclose(count, self.micro_batches) or (count > 0 and not self.micro_batches)

    def flush(self) -> None:
        """Treat as done what waits for a validation that will not come: the run was stopped."""
        for step in sorted(filter(self.is_run, list(self.waiting))):
            self._finish(step)

    def _finish(self, step: int) -> None:
        told = self.waiting.pop(step)
        parts = [r for r in told if r.loss is not None]
        counts = [r.micro_batches for r in parts]
        whole = StepResult(
            step,
            statistics.fmean([r.loss for r in parts if r.loss is not None], counts),
            max(r.seconds for r in parts),
            self.micro_batches or round(sum(counts)),
            {
                name: statistics.fmean([r.figures[name] for r in parts], counts)
                for name in parts[0].figures
            },
            next((r.validated for r in told if r.validated is not None), None),
        )
        self.finished.append(whole)  # 20 in docs/architecture.md
        if self.done is not None:
            self.done(whole)


def outcome_of(results: list[RankResult], steps: Steps, weights: Mapping[str, Tensor]) -> Outcome:
    """Return the outcome of all ranks' results."""
    versions: dict[int, int] = {}
    for result in results:
        versions |= result.versions
    spans = [span for result in results for span in result.spans]
    memory = [held for result in results for held in result.memory]
    spent = [result.spent for result in results if result.spent is not None]
    samples = [result.samples for result in results if result.samples is not None]
    most = max(len(r.window_s) for r in results)  # a rank may have been left out of some
    whole = (r.window_s for r in results if len(r.window_s) == most)
    slowest = [max(row) for row in zip(*whole, strict=True)]
    is_whole = all(len(r.window_s) == most for r in results)
    return Outcome(
        timeline=Timeline.of(len(results), spans, memory, meta=(("clock", "measured"),)),
        steps=tuple(sorted(steps.finished, key=lambda step: step.step)),
        step_s=statistics.median(slowest[min(2, len(slowest) - 1) :]),
        peak_bytes=tuple(result.peak_bytes for result in results),
        weights=weights,
        live_versions=tuple(versions[stage] for stage in sorted(versions)),
        breakdown=breakdown_of_ranks(spent) if is_whole and len(spent) == len(results) else None,
        samples=tuple(samples) if len(samples) == len(results) else (),
        saves=tuple(result.saves for result in results),
        noise=tuple(result.noise for result in results),
        held=tuple(result.held for result in results),
    )
