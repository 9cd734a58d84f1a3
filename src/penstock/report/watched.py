"""Watched: how a run stands, read from its folder while it is under way or after it has ended.

The files grow while they are read: of a line that is half-written the rest comes later.
"""

import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, cast, final

from penstock.checkpoints.folders import complete, step_of
from penstock.errors import ReportError
from penstock.files import Json, json_object, read_json
from penstock.plan.plan import Plan
from penstock.report.inputs import DAMAGED, Generation, Inputs, Pair, inputs_of
from penstock.typed import damage, typed

State: TypeAlias = Literal["running", "ended", "stopped"]
_RECENT = 20  # steps whose median is what is measured now
_SILENT_STEPS, _SILENT_S = 5.0, 10.0  # after which nobody seems to work on a run any more
_OF_A_RUN = "metrics.jsonl", "plan.json", "job.json", "events.jsonl", ".lock"


class KeptCheckpoint(NamedTuple):
    """A complete checkpoint: after how many steps, its bytes, and when it was there."""

    step: int
    size_bytes: int
    time_s: float


class WatchedRank(NamedTuple):
    """A process that is a rank of the run, or was: the steps done, or until it went, and how."""

    member: int
    works: bool
    step: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class Watched:
    """How a run stands.

    state:      "ended": it has a summary; "stopped": it has none, and nobody works on it.
    silent_s:   since anything was written.
    num_steps:  in all; None where the run does not say.
    step_s, tokens_per_s, samples_per_s:  predicted of the plan that is run now, and the median of
                its last steps.
    inputs:     what its pictures are drawn from.
    """

    folder: Path
    state: State
    silent_s: float
    num_steps: int | None
    step_s: Pair
    tokens_per_s: Pair
    samples_per_s: Pair
    ranks: tuple[WatchedRank, ...]
    checkpoints: tuple[KeptCheckpoint, ...]
    inputs: Inputs

    @property
    def step(self) -> int:
        """Return the number of steps so far."""
        return self.inputs.steps[-1].step if self.inputs.steps else 0

    @property
    def loss(self) -> float | None:
        """Return the loss of the newest step."""
        return self.inputs.steps[-1].loss if self.inputs.steps else None

    @property
    def changes(self) -> tuple[Generation, ...]:
        """Return the generations after the first: each is a change that cost something."""
        return self.inputs.changes.generations[1:]

    @property
    def left_s(self) -> float | None:
        """Return the seconds that the remaining steps take at the pace of the last ones."""
        measured_s = self.step_s.measured
        if self.state != "running" or not self.num_steps or measured_s is None:
            return None
        return (self.num_steps - self.step) * measured_s or None

    def to_json(self) -> dict[str, Json]:
        """Return the state of the run as JSON values."""
        generations = self.inputs.changes.generations
        return {
            "folder": str(self.folder),
            "state": self.state,
            "silent_s": self.silent_s,
            "step": self.step,
            "steps": self.num_steps,
            "left_s": self.left_s,
            "loss": self.loss,
            "step_s": dict(self.step_s._asdict()),
            "tokens_per_second": dict(self.tokens_per_s._asdict()),
            "samples_per_second": dict(self.samples_per_s._asdict()),
            "generation": generations[-1].generation if generations else None,
            "ranks": [dict(rank._asdict()) for rank in self.ranks],
            "changes": [_change(each) for each in self.changes],
            "machines": [asdict(each) for each in self.inputs.changes.machines],
            "checkpoints": [dict(each._asdict()) for each in self.checkpoints],
        }


def _change(each: Generation) -> dict[str, Json]:
    return {
        "step": each.step,
        "generation": each.generation,
        "what": each.what,
        "gone": dict(each.gone),
        "plan": each.plan,
        "way": each.way,
        "cost_s": each.cost_s,
        "moved_bytes": each.moved_bytes,
        "predicted_moved_bytes": each.predicted_moved_bytes,
        "predicted_step_s": each.predicted_step_s,
        "back_to": each.back_to or None,
        "why": each.why,
    }


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run, or what is left of one."""
    return any((folder / name).exists() for name in _OF_A_RUN)


@final
class Watch:
    """Reads a run's folder again and again; of files that only grow, what is new.

    Raises:   ReportError: the folder holds no run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if not is_run(folder):
            what = "holds no run" if folder.is_dir() else "is no folder"
            hint = "give the folder that `penstock train --out` wrote"
            raise ReportError(f"{folder} {what}: no metrics.jsonl, no plan.json", hint=hint)
        self._metrics = _Lines(folder / "metrics.jsonl")
        self._events = _Lines(folder / "events.jsonl")
        self._machines = _Lines(folder / "decisions.jsonl")

    def look(self, now_s: float, *, is_held: bool) -> Watched:
        """Return the state of the run.

        is_held:  whether the process that started it is there.
        Raises:   ReportError, PlanError: a file is damaged.
        """
        folder = self.folder
        summary, plan_file = folder / "summary.json", folder / "plan.json"
        has_ended = summary.exists() and not is_held
        content = read_json(summary, ReportError, "summary") if has_ended else {}
        events = list(self._events.read())
        plan = Plan.load(plan_file) if plan_file.exists() else None
        machines = list(self._machines.read())
        about: dict[str, Json] = {**content, "generations": cast(Json, events)}
        about["machines"] = cast(Json, machines)
        told = inputs_of(plan, (None, None), self._metrics.read(), about, folder.resolve().name)
        steps, checkpoints = _steps_of(folder, content), tuple(_checkpoints(folder))
        silent_s = max(0.0, now_s - self._newest_s())
        last_s = told.steps[-1].seconds if told.steps else 0.0
        patience_s = max(_SILENT_S, _SILENT_STEPS * last_s if math.isfinite(last_s) else 0.0)
        works = is_held or silent_s < patience_s
        state: State = "ended" if has_ended else "running" if works else "stopped"
        step_s, tokens, samples = _paces(told)
        rates = steps, step_s, tokens, samples
        return Watched(folder, state, silent_s, *rates, _ranks(told), checkpoints, told)

    def _newest_s(self) -> float:
        names = (*_OF_A_RUN, "summary.json", "checkpoints")
        files = [self.folder / name for name in names]
        return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


@final
class _Lines:
    """The JSON objects of a file, one a line; each is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Mapping[str, Json]] = []
        self._at = self._file = 0

    def read(self) -> list[Mapping[str, Json]]:
        """Return the rows of all complete lines.

        Raises:   ReportError: one is damaged.
        """
        if not self._path.exists():
            self._rows, self._at = [], 0
            return self._rows
        with self._path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._file or stat.st_size < self._at:  # written anew by a resume
                self._rows, self._at, self._file = [], 0, stat.st_ino
            file.seek(self._at)
            text = file.read()
        whole, _, _ = text.rpartition(b"\n")
        for line in whole.splitlines():
            where = f"line {len(self._rows) + 1} of {self._path}"
            self._rows.append(json_object(line, ReportError, where))
        self._at += len(whole) + 1 if whole else 0
        return self._rows


def _steps_of(folder: Path, summary: Mapping[str, Json]) -> int | None:
    """Return the number of steps of a whole run; None: its files do not say."""
    path = folder / "job.json"
    content = dict(summary)
    if "steps" not in content and path.exists():
        content = read_json(path, ReportError, "job.json")
    with damage(f"{folder}: the number of steps", ReportError, hint=DAMAGED):
        return typed(_StepsInAll, {k: v for k, v in content.items() if k == "steps"}).steps


@dataclass(frozen=True, slots=True)
class _StepsInAll:
    steps: int | None = None


def _checkpoints(folder: Path) -> "list[KeptCheckpoint]":
    found: list[KeptCheckpoint] = []
    for path in complete(folder / "checkpoints"):
        try:
            sizes = [entry.stat().st_size for entry in os.scandir(path)]
            time_s = (path / "state.json").stat().st_mtime
        except FileNotFoundError:  # it did not stay
            continue
        found.append(KeptCheckpoint(step_of(path), sum(sizes), time_s))
    return found


def _paces(told: Inputs) -> tuple[Pair, Pair, Pair]:
    """Return seconds per step, tokens and samples per second of the plan that is run now."""
    last = told.changes.generations[-1] if told.changes.generations else None
    predicted_s = told.plan.predicted.step_s if told.plan and told.plan.predicted else None
    if last is not None and last.predicted_step_s is not None:
        predicted_s = last.predicted_step_s
    first = last.step if last is not None else 0
    # The first step of a generation also waits for those who are not ready yet.
    own = [each for each in told.steps if each.step > first + 1] or list(told.steps[-1:])
    recent = [each for each in own[-_RECENT:] if math.isfinite(each.seconds)]
    measured_s = statistics.median(each.seconds for each in recent) if recent else None
    pairs = [Pair(predicted_s, measured_s)]
    for name in ("tokens_per_second", "samples_per_second"):
        each = recent[-1] if recent else None
        rate = cast("float | None", getattr(each, name)) if each else None
        if each is None or rate is None or not measured_s:
            pairs.append(Pair(None, None))
            continue
        count = rate * each.seconds  # of a step
        pairs.append(Pair(count / predicted_s if predicted_s else None, count / measured_s))
    return pairs[0], pairs[1], pairs[2]


def _ranks(told: Inputs) -> tuple[WatchedRank, ...]:
    """Return all that are or were ranks, by number."""
    done = told.steps[-1].step if told.steps else 0
    if not told.changes.generations:
        count = told.plan.total_ranks if told.plan is not None else len(told.used.peak_bytes[1])
        return tuple(WatchedRank(member, True, done) for member in range(count))
    found: dict[int, WatchedRank] = {}
    for each in told.changes.generations:
        for member in each.members:
            if member not in found or not found[member].works:
                found[member] = WatchedRank(member, True, max(done, each.step))
        for name, how in each.gone.items():
            found[int(name)] = WatchedRank(int(name), False, each.step, how)
    return tuple(found[member] for member in sorted(found))
