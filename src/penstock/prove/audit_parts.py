"""Audit parts: what all ranks have kept of a step, put together for who makes it again.

Whatever of it is missing, cannot be read or has another shape is a difference as much as a wrong
number is: a rank that writes too little may have computed too little.  So is what the author's own
code raises, as the plain loop would have ended there.  Only a machine that has no room left says
nothing of the step.
"""

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.checkpoints import checkpoint
from penstock.checkpoints.checkpoint import UNREADABLE
from penstock.errors import CheckpointError, PenstockError, RunError
from penstock.runtime.audited import CHANGES, LATER, LAW, STEPS, note_of, ranks_of, taken

_ABOUT = "cpu", "held", "losses"  # what each rank notes under its number
_NO_ROOM = {  # what the machine lacks, whatever is computed
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.EIO,
}


class PartsError(RunError):
    """What the ranks have kept of a step is not what a step leaves."""


class KeptStep(NamedTuple):
    """What was kept of a step, or of the first steps of a window.

    cpu_s:  of each rank all its processor time, and what keeping took of it.
    law:    by which the steps were computed; empty: one by one.
    steps:  that were kept.
    change: of the model that a traced step does not follow, in words; empty: none.
    """

    cpu_s: Mapping[str, tuple[float, float]]
    law: str
    steps: int
    change: str = ""


def put_together(place: Path, step: int) -> KeptStep:
    """Make checkpoints of what ranks have kept of a step; return what is noted of it.

    Raises:   PartsError: something is missing, unreadable or of another shape, or an optimizer was
              called more or less often than there are steps.
              OSError: the machine has no room for it.
    """
    try:
        return _put_together(place, step)
    except PartsError:
        raise
    except (CheckpointError, *UNREADABLE) as problem:
        if lacks_room(problem):
            raise
        raise PartsError(f"what ranks have kept of it is damaged: {_text(problem)}") from problem


def _put_together(place: Path, step: int) -> KeptStep:
    for folder in (place / "before", place / "after"):
        _check_notes(folder)
    taken(place / "before", step)
    after = taken(place / "after", step + 1)
    whole = checkpoint.unread(after)
    plain, heads = whole.plain, {key.partition("/")[0] for key in whole.tensors}
    law, steps = str(plain.get(LAW, "")), int(str(plain[STEPS]))
    calls = 1 + sum(head.startswith(LATER.partition("{")[0]) for head in heads)
    if calls != steps:
        raise PartsError(f"an optimizer was called {calls} times in {steps} of its steps")
    own = {k.partition("/")[2]: v for k, v in plain.items() if k.startswith("cpu/")}
    losses = [row for k, v in plain.items() if k.startswith("losses/") for row in _rows(v)]
    count = sum(count for _, count in losses)
    loss = sum(loss * count for loss, count in losses) / count if count else float("nan")
    (place / "losses.json").write_text(json.dumps({str(step): loss}))
    (place / "after").rename(place / str(step))
    told: list[Any] = [v for k, v in plain.items() if k.startswith(f"{CHANGES}/")]
    change = str(told[0][0]) if told else ""
    return KeptStep({rank: _pair(value) for rank, value in own.items()}, law, steps, change)


def _check_notes(folder: Path) -> None:
    """Raise where a rank has not written all that each rank writes.

    Raises:   PartsError.  CheckpointError: a note is damaged.
    """
    when = f"the state {folder.name} it"
    notes = {rank: note_of(folder, rank) for rank in ranks_of(folder)}
    if not notes:
        raise PartsError(f"no rank has written its part of {when}")
    for rank in range(max(note.ranks for note in notes.values())):
        if rank not in notes or not (folder / f"rank-{rank}.safetensors").exists():
            raise PartsError(f"rank {rank} has not written its part of {when}")
        told = notes[rank].plain
        for what in _ABOUT if folder.name == "after" else ():
            if f"{what}/{rank}" not in told:
                raise PartsError(f'rank {rank} has noted no "{what}" of {when}')


def lacks_room(problem: BaseException) -> bool:
    """Return whether an error tells of the machine, which has no room left, and not of a step."""
    cause = problem.__cause__ if isinstance(problem, CheckpointError) else problem
    if isinstance(cause, OSError):
        return cause.errno in _NO_ROOM
    no_memory = isinstance(cause, MemoryError | torch.OutOfMemoryError)
    return no_memory or (isinstance(cause, RuntimeError) and "allocate memory" in str(cause))


def words_of(problem: Exception) -> str:
    """Return how a step that cannot be made again differs from the plain loop's."""
    match problem:
        case PartsError():
            return problem.message
        case CheckpointError():
            return f"what ranks have kept of it does not fit: {problem.message}"
        case _:
            return f"the plain loop ends there: {_text(problem)}"


def _text(problem: BaseException) -> str:
    if isinstance(problem, PenstockError):
        return problem.message
    return f"{type(problem).__name__}: {problem}"


def _rows(value: Any) -> Sequence[tuple[float, float]]:
    return [(float(loss), float(count)) for loss, count in value]


def _pair(value: Any) -> tuple[float, float]:
    whole, kept = value
    return float(whole), float(kept)
