"""Resumed: whether a job in one process goes on from a checkpoint as an unbroken run does.

The examination names what Python keeps and the job reads.  What it cannot name - a tensor of an
earlier micro-batch, what an extension keeps - is found by doing it: some steps, and the same ones
broken off after the last but one, each from the job as it was made.
"""

import tempfile
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import JobError, PenstockError
from penstock.job import Job
from penstock.runtime import checkpoint
from penstock.runtime.child import apart
from penstock.runtime.eager import EagerTask, work_eagerly
from penstock.runtime.launch import run_processes
from penstock.training.settle import in_one_process

if TYPE_CHECKING:
    from penstock.training.examine import Examined

_DONE, _STEPS, _FEW = 2, 3, 2  # steps before it is broken off, and in all; micro-batches of each
_MEND = "name it in Job.state, or give --forget-state to begin it anew"


def check_resumed(job: Job, found: "Examined") -> None:
    """Raise where a run in one process would not go on as an unbroken one.

    Raises:   JobError: it says what would begin anew, with its line.
    """
    head = "a run that goes on from a checkpoint would begin anew what this job keeps in Python"
    if found.forgets:
        rows = [f"  {one}" for one in found.forgets[:3]]
        raise JobError("\n".join([head, *rows]), hint=_MEND)
    if not found.one_process:
        return
    if lost := forgotten(job):
        raise JobError(f"{head}\n  {lost}\n{found.one_process}", hint=_MEND)


def forgotten(job: Job) -> str:
    """Return what differs where a job in one process goes on from a checkpoint; "" if nothing.

    A job whose steps differ when they are done again as they are is not told apart.
    Ignores:  what acts only after more steps than three.
    Raises:   JobError, CheckpointError: the job fails, or its state cannot be saved.
    """
    few = replace(job, micro_batches=min(_FEW, job.micro_batches), validation=None)
    few = replace(in_one_process(few), validate_every=None, writers=())

    def tried() -> str:
        quiet = StringIO()  # what the job prints, it prints again when it trains
        place = tempfile.TemporaryDirectory(prefix="penstock-")
        with redirect_stdout(quiet), redirect_stderr(quiet), place as name:
            return _tried(few, Path(name))

    return str(apart(tried))


def _tried(job: Job, folder: Path) -> str:
    try:
        whole = _ran(job, folder / "whole", 0, _STEPS, None)
        _ran(job, folder / "part", 0, _DONE, None)
        done = checkpoint.latest(folder / "part")
        broken = _ran(job, folder / "part", _DONE, _STEPS - _DONE, done)
    except PenstockError as problem:
        if "the job's data ended" in problem.message:
            return ""
        raise
    names = _differing(whole, broken)
    if not names or _differing(whole, _ran(job, folder / "again", 0, _STEPS, None)):
        return ""
    return f"{names[0]} is not as in an unbroken run, one step after it"


def _ran(
    job: Job, folder: Path, first: int, steps: int, resume: Path | None
) -> checkpoint.Checkpoint:
    task = EagerTask(job, first, steps, folder, 0, resume, laws={})
    run_processes(partial(work_eagerly, task), 1, lambda step: None)
    newest = checkpoint.latest(folder)
    assert newest is not None, "a run ends with a checkpoint"
    return checkpoint.load(newest)


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
