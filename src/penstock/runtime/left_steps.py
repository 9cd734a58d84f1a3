"""Left steps: where the job's own code fails, ranks leave what they hold after the last whole step.

An error in data, in the model or in a loss comes in the middle of a step, before its updates.  Each
rank then still holds the weights after the step before, and writes its part of a checkpoint by
itself, for nothing goes between ranks any more.  Whoever has started them completes it, if all have
left the same step.

    rank 0  .step-000007-failed/rank-0.safetensors, rank-0.json, 0.left
    rank 1  .step-000007-failed/1.left: a replica, whose part is that of rank 0

Left out, where nothing is left: a rank that has begun an update of its window; models whose forward
writes into buffers, and jobs with state of their own: both may have moved on within the step; and
numbers that are not finite, of which ranks leave another note (finite.py).
"""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.checkpoints import checkpoint, folders
from penstock.checkpoints.saver import State
from penstock.errors import AloneError, BatchMisfitError, CheckpointError
from penstock.files import read_json, write_text
from penstock.runtime.finite import NotFiniteError
from penstock.runtime.rank import Rank
from penstock.transport.transport import TransportError

# The run goes on in another way from an older state, or what ranks hold is not to be kept.
NOT_LEFT = NotFiniteError, CheckpointError, AloneError, BatchMisfitError
_ATTEMPT = "-failed"
_LEAST_S, _MOST_S = 0.5, 2.0
_IS_HERE, _HAS_LEFT = ".here", ".left"  # notes of a rank that writes, and has written
_has_left = threading.Event()  # in the process of a rank, which ends with it


def has_left() -> bool:
    """Return whether a rank of this process has left steps for others to be completed."""
    return _has_left.is_set()


@contextmanager
def leaving_steps(
    checkpoints: Path | None,
    rank: Rank,
    part: Callable[[], State | None],
    first_step: int,
    step_s: Callable[[], float] = lambda: 0.0,
) -> Generator[None]:
    """Have a rank leave its part where the job's own code fails, here or on another rank.

    part:        of a checkpoint, of what it holds now; None: it has none.
    first_step:  of the run: after so many there is nothing to leave.
    step_s:      how long the last step took.  As long the others have to come to the same step,
                 0.5 to 2 s, before they are told.
    """
    try:
        yield
    except NOT_LEFT:
        raise
    except Exception as problem:
        if not isinstance(problem, TransportError):
            time.sleep(min(max(step_s(), _LEAST_S), _MOST_S))
        rank.transport.abort(str(problem) or type(problem).__name__)
        if checkpoints is not None and _is_whole(rank, first_step):
            with suppress(CheckpointError, OSError):  # the error itself is told in any case
                _leave(checkpoints, rank, part())
        raise


def _is_whole(rank: Rank, first_step: int) -> bool:
    """Return whether a rank holds what it did when its window began."""
    progress, written = rank.progress, rank.capture.graph.written
    is_moved = any(n in written for w in rank.weights.values() for n in w.buffers)
    is_moved = is_moved or bool(rank.carried) or bool(rank.job.state) or bool(rank.served)
    begun = progress.updates > 0 or bool(rank.unsettled)
    return progress.first_step > first_step and not begun and not is_moved


def _leave(checkpoints: Path, rank: Rank, state: State | None) -> None:
    step, count = rank.progress.first_step, rank.transport.num_ranks
    hidden = folders.hidden_of(checkpoints, step, _ATTEMPT)
    hidden.mkdir(parents=True, exist_ok=True)
    write_text(hidden / f"{rank.rank}{_IS_HERE}", json.dumps({"ranks": count}))
    if state is not None:
        checkpoint.write_part(checkpoints, step, rank.rank, state, _ATTEMPT)
    (hidden / f"{rank.rank}{_IS_HERE}").rename(hidden / f"{rank.rank}{_HAS_LEFT}")
    _has_left.set()


def complete(checkpoints: Path) -> Path | None:
    """Return the checkpoint that ranks have left, if all of them have left the same step."""
    for hidden in sorted(checkpoints.glob(f".step-*{_ATTEMPT}")):
        step = int(hidden.name.removeprefix(".step-").removesuffix(_ATTEMPT))
        if not (notes := sorted(hidden.glob(f"*{_HAS_LEFT}"))):
            continue
        with suppress(CheckpointError, OSError):
            counts = [read_json(note, CheckpointError, "note")["ranks"] for note in notes]
            is_whole = counts == [len(notes)] * len(notes)
            if is_whole and not folders.folder_of(checkpoints, step).exists():
                for note in notes:
                    note.unlink()
                return folders.finish(checkpoints, step, _ATTEMPT)
    return None


def complete_and_discard(checkpoints: Path) -> None:
    """Complete what ranks have left of a run that has failed; nothing else half-written stays."""
    complete(checkpoints)
    folders.discard(checkpoints)
