"""Chronicle: what the first member of an elastic run writes down for all of them.

A row of each step as it happens, and at the end timeline, summary and report.  Whoever is first at
a moment writes; another one goes on where that one has stopped, whatever stopped it, so that each
step has one row.

metrics.jsonl   a line for each step, as of any run
.ended.json     what all ranks measured: the run is over; null: it was stopped
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, final

from penstock.choose.choose import Choice
from penstock.errors import RunError
from penstock.files import append, finite, read_json, write_text
from penstock.job import Job
from penstock.listener import SILENT
from penstock.pilot.goal import GoalWatch
from penstock.runtime.calls import StepResult
from penstock.training.at_work import ENDED
from penstock.training.results import RunEnd, Trained, finished, read_back

if TYPE_CHECKING:
    from penstock.runtime.run import Outcome
    from penstock.runtime.worker import RankResult

Stop = Literal["stopped"]
METRICS = "metrics.jsonl"
_OF_A_ROW = ("step", "loss", "seconds", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True, slots=True)
class RunAbout:
    """What rows and summary tell of besides what ranks measure.

    samples, tokens:  of a step.
    checked:          how the plan was compared with the plain loop.
    sizes_of:         tells samples and tokens of a step, where they are not all alike.
    """

    num_steps: int
    samples: int
    tokens: int
    checked: str = ""
    sizes_of: Callable[[int], tuple[int, int]] | None = None

    def sizes(self, step: int) -> tuple[int, int]:
        """Return samples and tokens of a step."""
        return self.sizes_of(step) if self.sizes_of else (self.samples, self.tokens)


def sizes(job: Job, choice: Choice | None) -> tuple[int, int, int, float | None]:
    """Return samples, tokens and micro-batches of a step, and the seconds that it should take."""
    if choice is None:
        return 0, 0, job.micro_batches, None
    graph, count, expected = choice.captured.graph, choice.job.micro_batches, choice.plan.predicted
    step_s = expected.step_s if expected else None
    return graph.samples * count, graph.tokens * count, job.micro_batches, step_s


def sizes_by_ranks(job: Job, step: StepResult, samples: int, tokens: int) -> tuple[int, int]:
    """Return samples and tokens of one step, of those of a whole one: fewer where ranks are not
    there and the batch follows them.
    """
    if not job.batch_by_ranks:
        return samples, tokens
    of = job.micro_batches
    count = int(step.micro_batches)
    return samples * count // of, tokens * count // of


def row_of(step: StepResult, samples: int, tokens: int) -> dict[str, float | int | None]:
    """Return the row of a step, as metrics.jsonl has it."""
    assert step.loss is not None, "it has happened"
    return {
        "step": step.step + 1,
        "loss": step.loss,
        **step.figures,
        "seconds": step.seconds,
        "samples_per_second": samples / step.seconds if samples else None,
        "tokens_per_second": tokens / step.seconds if tokens else None,
        **(step.validated or {}),
    }


@final
@dataclass(eq=False)
class Chronicle:
    """Writes into `folder` for all.

    choice:   returns what the run followed at its end.
    goal:     a loss at which it ends: it hears every row, also those that others have written.
    """

    folder: Path
    job: Job
    about: RunAbout
    choice: Callable[[], Choice]
    goal: GoalWatch | None = None
    _pending: StepResult | None = None
    _written: int = -1  # the newest step of the file, when it had so many bytes
    _size_bytes: int = -1
    _file: int = -1

    def report(self, told: StepResult) -> None:
        """Take a step that has happened, or what its validation gave; perhaps once more."""
        pending = self._pending
        if told.validated is not None:
            if pending is not None and pending.step == told.step:
                self._pending = None
                self._write(replace(pending, validated=told.validated))
            return
        self._flush()
        if told.loss is not None and self._is_validated(told.step):
            self._pending = told
        elif told.loss is not None:
            self._write(told)

    def _is_validated(self, step: int) -> bool:
        every = self.job.validate_every
        return every is not None and ((step + 1) % every == 0 or step + 1 == self.about.num_steps)

    def _flush(self) -> None:
        """Write down the step whose validation will not come any more."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._write(pending)

    def _write(self, step: StepResult) -> None:
        self._look()
        if step.step <= self._written:
            return
        row = row_of(step, *sizes_by_ranks(self.job, step, *self.about.sizes(step.step)))
        if self.job.batch_by_ranks:
            row["micro_batches"] = step.micro_batches
        line = json.dumps(finite(dict(row)), allow_nan=False).encode() + b"\n"
        append(self._file, line, self.folder / METRICS)
        self._written, self._size_bytes = step.step, os.fstat(self._file).st_size
        if self.goal is not None:
            self.goal.hear(row, self.job.micro_batches)

    def _look(self) -> None:
        """Learn what another member has written; half a line, left by one that died, is removed."""
        if self._file < 0:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            self._file = os.open(self.folder / METRICS, flags, 0o666)
        size = os.fstat(self._file).st_size
        if size == self._size_bytes:
            return
        content = os.pread(self._file, size, 0)
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(self._file, len(whole))
        rows = whole.splitlines()
        self._written = json.loads(rows[-1])["step"] - 1 if rows else -1
        if self.goal is not None:
            self.goal = self.goal.afresh()
            for row in map(json.loads, rows):
                self.goal.hear(row, self.job.micro_batches)

    def close(self) -> None:
        """Let go of the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def finish(self, results: "list[RankResult] | None") -> None:
        """Write what is written at the end; it may have been stopped before its last step."""
        from penstock.runtime.launch import as_json

        self._flush()
        self._look()
        self.close()
        choice, told = self.choice(), None
        is_reached = self.goal is not None and self.goal.is_reached
        if results is not None and (is_reached or self._written + 1 == self.about.num_steps):
            told = [as_json(result) for result in results]
            about = self.folder, self.job, self._written + 1, _outcome(self.folder, results)
            finished(RunEnd(*about, choice, self.about.checked, self.goal), SILENT)
        write_text(self.folder / ENDED, json.dumps({"results": told}) + "\n")


def ended(folder: Path, choice: Callable[[], Choice]) -> "Trained | Stop | None":
    """Return how the run in `folder` ended: what it gave, or that it was stopped; None: not yet.

    choice:   returns what it followed at its end.
    """
    from penstock.runtime.launch import from_json

    if not (folder / ENDED).exists():
        return None
    told = read_json(folder / ENDED, RunError, "what ranks measured")["results"]
    if told is None:
        return "stopped"
    rows = cast(list[dict[str, Any]], told)
    return read_back(folder, _outcome(folder, [from_json(row) for row in rows]), choice())


def _outcome(folder: Path, results: "list[RankResult]") -> "Outcome":
    """Return what a run gave whose ranks measured this."""
    from penstock.checkpoints.checkpoint import latest, load
    from penstock.runtime.run import Steps, outcome_of

    steps = Steps(1)
    steps.finished += [_step_of(json.loads(line)) for line in _lines_of(folder)]
    newest = latest(folder / "checkpoints")
    assert newest is not None, "a run ends with a checkpoint"
    return outcome_of(results, steps, load(newest).tensors)


def _lines_of(folder: Path) -> list[str]:
    return (folder / METRICS).read_text().splitlines()


def _step_of(row: Mapping[str, float]) -> StepResult:
    validated = {name: value for name, value in row.items() if name.startswith("val_")}
    rest = {name: value for name, value in row.items() if name not in (*validated, *_OF_A_ROW)}
    loss, seconds = row["loss"], row["seconds"]
    return StepResult(int(row["step"]) - 1, loss, seconds, 1, rest, validated or None)
