"""Of a run: what an elastic run tells of itself, as a job and a trace that a replay takes.

Ranks are machines.  A rank is useful from the generation on in which it is, so `start_s` is 0; what
changes cost is the mean of agreeing and getting ready; a step on n ranks takes what steps of
generations of n ranks took in the mean, those that write a checkpoint included, and without the
first of each generation.  The last generation ends with the last step that was written.

Ignores:  that the first step of a generation takes longer than others; steps that were done again.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from penstock.errors import FleetError
from penstock.files import read_bytes, read_json
from penstock.fleet.job_work import FleetJob, Speed, read_job
from penstock.typed import damage, typed

_HINT = "give the folder of a run of `penstock train --elastic`"


@dataclass(frozen=True, slots=True)
class _EventRow:
    """A line of events.jsonl, as far as it is read."""

    time: float
    step: int
    members: tuple[int, ...]
    agreed_s: float
    ready_s: float


@dataclass(frozen=True, slots=True)
class _BackRow:
    """A line of events.jsonl: whether the run has gone back to a checkpoint, and its pause."""

    what: str
    agreed_s: float
    ready_s: float
    back_to: str = ""

    @property
    def back(self) -> bool:
        """Return whether state was read from a checkpoint while the run ran."""
        return bool(self.back_to) and self.what != "begins"


@dataclass(frozen=True, slots=True)
class _StepRow:
    """A line of metrics.jsonl, as far as it is read."""

    step: int
    seconds: float


class RankChange(NamedTuple):
    """A rank that comes ("add") or goes ("remove"), in seconds from the first generation on."""

    time_s: float
    event: str
    machine: str


class RunRecord(NamedTuple):
    """What a run was: a job of `job.steps` steps, who was there, and the seconds of all of it."""

    job: FleetJob
    trace: tuple[RankChange, ...]
    seconds: float

    @property
    def csv(self) -> str:
        """Return the trace as `penstock fleet` reads one."""
        rows = [f"{row.time_s:.6f},{row.event},{row.machine}" for row in self.trace]
        return "\n".join(["time_s,event,machine", *rows]) + "\n"

    @property
    def toml(self) -> str:
        """Return the job as `penstock fleet` reads one."""
        job = self.job
        fields = ("steps", "start_s", "reform_s", "restart_s", "checkpoint_s")
        lines = [f"{name} = {getattr(job, name):.9g}" for name in fields]
        speeds = [f"{speed.machines} = {speed.steps_per_s:.9g}" for speed in job.speeds]
        return "\n".join([*lines, "has_copies = true", "[speeds]", *speeds]) + "\n"


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a run has measured that other runs of its job can expect; None: it did not.

    rates:  steps per second by ranks.
    """

    rates: Mapping[int, float]
    reform_s: float | None = None
    start_s: float | None = None
    restart_s: float | None = None
    checkpoint_s: float | None = None

    def __str__(self) -> str:
        seconds = ("reform_s", "start_s", "restart_s", "checkpoint_s")
        known = [(name, getattr(self, name)) for name in seconds]
        words = [f"{name} {value:.3g}" for name, value in known if value is not None]
        words += [f"{rate:.4g} steps/s on {count}" for count, rate in self.rates.items()]
        return ", ".join(words) or "nothing"


def figures_in(path: Path) -> RunFigures:
    """Return the figures of the run in a folder, or of a TOML file.

    reform_s      mean pause of a change
    start_s       mean time from the order of machines until all were there, of a run that followed
                  a policy
    checkpoint_s  for which a checkpoint kept its ranks
    restart_s     mean pause of a generation that went back to a checkpoint
    Of a TOML file speeds and pauses; what is 0 there was not told apart.
    Raises:   FleetError: there is no such run or file, or it is damaged.
    """
    if path.suffix == ".toml":
        job = read_job(path)
        seconds = (job.reform_s, job.start_s, job.restart_s, job.checkpoint_s)
        rates = {speed.machines: speed.steps_per_s for speed in job.speeds}
        return RunFigures(rates, *(each or None for each in seconds))
    found = recorded(path).job
    rates = {speed.machines: speed.steps_per_s for speed in found.speeds}
    back = [
        one.agreed_s + one.ready_s for one in _read(path / "events.jsonl", _BackRow) if one.back
    ]
    seconds = _mean(_starts(path)), _mean(back), saved_s(path)
    return RunFigures(rates, found.reform_s, *seconds)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _starts(folder: Path) -> list[float]:
    """Return the seconds from each order of more machines until they were there."""
    path = folder / "decisions.jsonl"
    rows = _lines(path) if path.exists() else []
    with damage(f"{path}", FleetError, hint=_HINT):
        pairs = [
            (one, typed(float, other["took_s"]))
            for one, other in pairwise(rows)
            if one.get("what") == "wants" and other.get("what") == "there" and one.get("step")
        ]
        return [took_s for one, took_s in pairs if _grows(one)]


def _grows(row: Mapping[str, Any]) -> bool:
    """Return whether a decision has ordered machines."""
    counts = [typed(dict[str, float], row[name]) for name in ("wanted", "held")]
    wanted, held = counts
    return any(count > held.get(pool, 0.0) for pool, count in wanted.items())


def saved_s(folder: Path) -> float | None:
    """Return the seconds for which a checkpoint kept the ranks, if any was written."""
    path = folder / "summary.json"
    if not path.exists():
        return None
    told = read_json(path, FleetError, "summary").get("checkpointing")
    with damage(f"{path}", FleetError, hint=_HINT):
        return typed(float, told["blocked_s"]) if isinstance(told, dict) else None


def recorded(folder: Path, first_s: float = float("inf")) -> RunRecord:
    """Return the story of the elastic run in `folder`.

    first_s:  of generations that began later the speeds and pauses are not looked at: what is
              replayed of them is a prediction.
    Raises:   FleetError: there is no such run, or no generation of it; a file is damaged.
    """
    changes, took = _changes(folder), _seconds(folder)
    if not changes:
        raise FleetError(f"{folder} holds a run of 0 generations", hint=_HINT)
    start, last = changes[0].time, changes[-1]
    ends = max([last.step, *(step + 1 for step in took)])
    known = [one for one in changes if one.time - start <= first_s]
    pauses = [one.agreed_s + one.ready_s for one in known[1:]]
    job = FleetJob(
        steps=ends - changes[0].step,
        speeds=_speeds(took, [*changes, replace(last, step=ends)], len(known)),
        start_s=0.0,
        reform_s=sum(pauses) / len(pauses) if pauses else 0.0,
        restart_s=0.0,
        checkpoint_s=0.0,
        has_copies=True,
    )
    last_s = sum(took.get(step, 0.0) for step in range(last.step, ends))
    return RunRecord(job, tuple(_trace(changes)), last.time - start + last_s)


def _changes(folder: Path) -> list[_EventRow]:
    return _read(folder / "events.jsonl", _EventRow)


def _seconds(folder: Path) -> dict[int, float]:
    """Return the seconds of each step, by the number of steps before it."""
    return {row.step - 1: row.seconds for row in _read(folder / "metrics.jsonl", _StepRow)}


Line = TypeVar("Line", _EventRow, _BackRow, _StepRow)


def _read(path: Path, line: type[Line]) -> list[Line]:
    names = line.__dataclass_fields__.keys()
    with damage(f"{path}", FleetError, hint=_HINT):
        rows = ({k: v for k, v in row.items() if k in names} for row in _lines(path))
        return [typed(line, row) for row in rows]


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file of JSON.

    Raises:   FleetError: there is none, or it is damaged.
    """
    text = read_bytes(path, FleetError, "run").decode(errors="replace")
    try:
        found = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    except ValueError as problem:
        raise FleetError(f"{path} is damaged: {problem}", hint=_HINT) from None
    if not all(isinstance(row, dict) for row in found):
        raise FleetError(f"{path} is damaged: a line is no record", hint=_HINT)
    return cast("list[dict[str, Any]]", found)


def _speeds(
    seconds: dict[int, float], changes: Sequence[_EventRow], known: int
) -> tuple[Speed, ...]:
    took: defaultdict[int, list[float]] = defaultdict(list)
    for number, (one, other) in enumerate(pairwise(changes)):
        if number < known:
            own = (seconds.get(step) for step in range(one.step + 1, other.step))
            took[len(one.members)] += [each for each in own if each]
    rates = {count: len(rows) / sum(rows) for count, rows in sorted(took.items()) if rows}
    if not rates:
        raise FleetError("no generation had two steps", hint="let it run for longer")
    return tuple(Speed(count, rate) for count, rate in rates.items())


def _trace(changes: Sequence[_EventRow]) -> list[RankChange]:
    start, found = changes[0].time, [RankChange(0.0, "add", f"{m}") for m in changes[0].members]
    for one, other in pairwise(changes):
        came, went = {*other.members} - {*one.members}, {*one.members} - {*other.members}
        paused_s = other.agreed_s + other.ready_s
        at = max(0.0, other.time - start - paused_s)
        found += [RankChange(at, "remove", f"{m}") for m in sorted(went)]
        found += [RankChange(at, "add", f"{m}") for m in sorted(came)]
    return found
