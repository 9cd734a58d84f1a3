"""Resumed: whether a job in one process goes on from a checkpoint as an unbroken run does.

The examination names what Python keeps and the job reads.  What it cannot name - a tensor of an
earlier micro-batch, what an extension keeps - is found by doing it: some steps, and the same ones
broken off after the last but one, each from the job as it was made.
"""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoints import checkpoint
from penstock.checkpoints.saver import SavePolicy
from penstock.choose.settle import in_one_process
from penstock.errors import JobError, PenstockError
from penstock.examine.unsaved import Key, Unsaved, told_later
from penstock.job import Job
from penstock.processes.child import apart
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes
from penstock.training.saved import kept_late

if TYPE_CHECKING:
    from penstock.examine.examine import Examined

_DONE, _STEPS, _FEW = 2, 3, 2  # steps before it is broken off, and in all; micro-batches of each
_BESIDE = "beside/"
Told = Callable[[], Mapping[str, str]]
_MEND = "name it in Job.state, or begin it anew: forget_state=True"


_HEAD = "a run that goes on from a checkpoint would begin anew what this job keeps in Python"


def check_late(folder: Path) -> None:
    """Raise where the run in `folder` was found, while it ran, to keep what no checkpoint holds.

    Raises:   JobError: it says what.
    """
    if late := kept_late(folder):
        raise JobError(f"{_HEAD}\n  {late}", hint=_MEND)


def check_resumed(job: Job, found: "Examined") -> None:
    """Raise where a run in one process would not go on as an unbroken one.

    Raises:   JobError: it says what would begin anew, with its line.
    """
    if found.forgets:
        rows = [f"  {one}" for one in found.forgets[:3]]
        raise JobError("\n".join([_HEAD, *rows]), hint=_MEND)
    beside = found.beside if found.one_process else [o for o in found.beside if o.by_update]
    if not (found.one_process or beside):
        return
    if lost := forgotten(job, beside, found.keys):
        raise JobError(
            "\n".join(one for one in (_HEAD, f"  {lost}", found.one_process) if one), hint=_MEND
        )


def forgotten(job: Job, beside: Sequence[Unsaved] = (), keys: Iterable[Key] = ()) -> str:
    """Return what differs where a job in one process goes on from a checkpoint; "" if nothing.

    What differs when the steps are done again as they are is not told apart.
    beside:   what the job keeps where no checkpoint looks, compared as well.
    keys:     of its functions.
    Ignores:  what acts only after more steps than three.
    Raises:   JobError, CheckpointError: the job fails, or its state cannot be saved.
    """
    few = replace(job, micro_batches=min(_FEW, job.micro_batches), validation=None)
    few = replace(in_one_process(few), validate_every=None, writers=())

    def told() -> dict[str, str]:
        return {f"{_BESIDE}{where}": value for where, value in told_later(beside, keys).items()}

    def tried() -> str:
        quiet = StringIO()  # what the job prints, it prints again when it trains
        place = tempfile.TemporaryDirectory(prefix="penstock-")
        with redirect_stdout(quiet), redirect_stderr(quiet), place as name:
            return _tried(few, Path(name), told if beside else None)

    lost = str(apart(tried))
    known = {f"{_BESIDE}{one.where}": one for one in beside}
    if lost in known:
        return f"{known[lost]}, and no checkpoint holds it"
    return f"{lost} is not as in an unbroken run, one step after it" if lost else ""


def _tried(job: Job, folder: Path, beside: Told | None) -> str:
    """Return the name of what differs first."""

    def ran(part: str, steps: range, resume: Path | None = None) -> checkpoint.Checkpoint:
        place = folder / part
        own = job, steps.start, len(steps), resume
        task = EagerTask(*own, laws={}, policy=SavePolicy(place), beside=beside)
        run_processes(partial(work_eagerly, task), 1, lambda step: None)
        newest = checkpoint.latest(place)
        assert newest is not None, "a run ends with a checkpoint"
        return checkpoint.load(newest)

    try:
        whole, _ = ran("whole", range(_STEPS)), ran("part", range(_DONE))
        broken = ran("part", range(_DONE, _STEPS), checkpoint.latest(folder / "part"))
    except PenstockError as problem:
        if "the job's data ended" in problem.message:
            return ""
        raise
    if not (names := _differing(whole, broken)):
        return ""
    moving = {*_differing(whole, ran("again", range(_STEPS)))}
    return next((name for name in names if name not in moving), "")


def _differing(one: checkpoint.Checkpoint, other: checkpoint.Checkpoint) -> list[str]:
    """Return the names of tensors, then of plain values, that are not the same in both."""
    names = sorted(
        {**one.tensors, **other.tensors}, key=lambda name: not name.startswith("weights")
    )
    both = [name for name in names if name in one.tensors and name in other.tensors]
    apart_ = [n for n in both if not one.tensors[n].equal(other.tensors[n])]
    apart_ += [n for n in names if n not in both]
    return apart_ + [
        k for k in {**one.plain, **other.plain} if one.plain.get(k) != other.plain.get(k)
    ]
