"""Folders: where the checkpoints of a run are, and how one becomes complete.  No torch.

Each rank puts its part into a hidden folder: a part file, then a note with the plain values and the
checksums.  When all notes are there, one process joins them to state.json and renames the folder.
A folder with that name is complete, whatever is killed when.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoints.part_file import Block, Piece, write_file
from penstock.errors import CheckpointError, PlanError
from penstock.files import read_json, write_text

_NAME = re.compile(r"step-(\d{6,})")
_LOOK_S, _PATIENCE_S = 0.05, 60.0
_TRIES = 5  # to name a folder that others name too


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: the newest, those after multiples of `every` steps, and the best.

    every:    0: none for that reason.
    best:     whether the one with the lowest validation loss is kept, as "best".
    Raises:   PlanError: not even the newest one would stay.
    """

    newest: int = 2
    every: int = 0
    best: bool = True

    def __post_init__(self) -> None:
        if self.newest < 1 or self.every < 0:
            message = f"keep has {self.newest} newest checkpoints, and every {self.every} steps"
            raise PlanError(message, hint='keep the newest one at least: keep="1"')

    def goes(self, steps: Sequence[int]) -> list[int]:
        """Return which of the checkpoints after `steps`, the oldest first, are removed."""
        old = steps[: -self.newest]
        return [step for step in old if not self.every or step % self.every]


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder for the state after `step` finished steps."""
    return checkpoints / f"step-{step:06d}"


def hidden_of(checkpoints: Path, step: int, token: str = "") -> Path:
    """Return the folder in which it is made; `token` tells one attempt from another."""
    return checkpoints / f".step-{step:06d}{token}"


def put_part(
    hidden: Path,
    rank: int,
    pieces: Sequence[Piece],
    blocks: Iterable[Block],
    plain: Mapping[str, object],
) -> None:
    """Write a rank's part of a checkpoint; its note comes last.

    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    with writing(hidden, sum(piece.size_bytes for piece in pieces)):
        hidden.mkdir(parents=True, exist_ok=True)
        sums = write_file(hidden / f"rank-{rank}.safetensors", pieces, blocks)
        write_text(_note(hidden, rank), json.dumps({"plain": dict(plain), "checksums": sums}))


def announce(hidden: Path, rank: int) -> None:
    """Tell the others that a rank's part of a checkpoint will come, whether it lives or not."""
    with suppress(OSError):  # the part itself will tell what is wrong
        hidden.mkdir(parents=True, exist_ok=True)
        _promise(hidden, rank).touch()


def are_announced(hidden: Path, ranks: Iterable[int]) -> bool:
    """Return whether the parts of all these ranks will come."""
    return all(_promise(hidden, rank).exists() for rank in ranks)


def has_parts(hidden: Path, ranks: Iterable[int]) -> bool:
    """Return whether the parts of all these ranks are there."""
    return all(_note(hidden, rank).exists() for rank in ranks)


def _note(hidden: Path, rank: int) -> Path:
    return hidden / f"rank-{rank}.json"


def _promise(hidden: Path, rank: int) -> Path:
    return hidden / f"rank-{rank}.announced"


def finish(checkpoints: Path, step: int, token: str = "") -> Path:
    """Join what the ranks wrote and give the folder its name; call it when all have written.

    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    hidden, folder = hidden_of(checkpoints, step, token), folder_of(checkpoints, step)
    with writing(hidden):
        plain: dict[str, object] = {}
        sums: dict[str, object] = {}
        for note in sorted(hidden.glob("rank-*.json")):
            told = read_json(note, CheckpointError, "checkpoint part")
            own = told["plain"]
            assert isinstance(own, dict), "as it was written"
            plain |= own
            sums[note.with_suffix(".safetensors").name] = told["checksums"]
            note.unlink()
        for promise in hidden.glob("rank-*.announced"):
            promise.unlink(missing_ok=True)
        content = {"step": step, "parts": sorted(sums), "plain": plain, "checksums": sums}
        write_text(hidden / "state.json", json.dumps({**content, "digest": digest_of(content)}))
        _name(hidden, folder)
        _flush(checkpoints)
    return folder


def _name(hidden: Path, folder: Path) -> None:
    """Give a folder its name, in place of what has it; somebody else may do the same just now."""
    for _ in range(_TRIES):
        with suppress(FileNotFoundError):  # another one has just removed it
            if folder.exists():
                remove(folder)
        try:
            hidden.rename(folder)
        except OSError as problem:
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise OSError(errno.EEXIST, "others go on writing there", str(folder))


def digest_of(content: Mapping[str, object]) -> str:
    """Return what is another text for another content of state.json."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def writing(folder: Path, size_bytes: int = 0) -> Generator[None]:
    """Raise what keeps a checkpoint from being written as an error with a hint.

    size_bytes:  that it takes, as far as this process knows.
    Raises:   CheckpointError.
    """
    try:
        yield
    except OSError as problem:
        hint = "free some space, or choose another place; earlier checkpoints are intact"
        needs = f" (it takes {size_bytes:,} bytes)" if size_bytes else ""
        message = f"cannot write checkpoint {folder}{needs}: {problem}"
        raise CheckpointError(message, hint=hint) from problem


def link(source: str, target: str) -> None:
    """Give a file another name, which costs no room; a copy where a file system has no links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _flush(path: Path) -> None:
    """Return once the names in a folder would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- which there are ------------------------------------------------------------------------------


def latest(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = complete(checkpoints)
    return found[-1] if found else None


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of all complete checkpoints of a run, the oldest first."""
    return [step_of(path) for path in complete(checkpoints)]


def step_of(folder: Path) -> int:
    """Return after how many steps a checkpoint is, by its name."""
    return int(folder.name.removeprefix("step-"))


def is_named(folder: Path) -> bool:
    """Return whether a folder has the name of a complete checkpoint."""
    return _NAME.fullmatch(folder.name) is not None


def complete(checkpoints: Path) -> list[Path]:
    """Return all complete checkpoints, the oldest first."""
    named = {p: m for p in checkpoints.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    return sorted(
        (path for path in named if (path / "state.json").exists()),
        key=lambda path: int(named[path][1]),
    )


def tidy(checkpoints: Path, keep: Keep) -> None:
    """Remove the checkpoints that do not stay."""
    for step in keep.goes(steps_in(checkpoints)):
        remove(folder_of(checkpoints, step))


def remove(folder: Path) -> None:
    """Remove a checkpoint so that it is never seen in part: under another name."""
    gone = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def give_up(hidden: Path, rank: int) -> None:
    """Tell the others that a rank's part of a checkpoint will not come."""
    with suppress(OSError):
        hidden.mkdir(parents=True, exist_ok=True)
        (hidden / f"rank-{rank}.failed").touch()


def call_off(hidden: Path, rank: int) -> None:
    """Remove what there is of a checkpoint that its first rank does not finish, but the word of it.

    A rank that is late would else begin anew, and wait for the others.
    """
    give_up(hidden, rank)
    with suppress(OSError):
        for path in hidden.iterdir():
            if path.suffix != ".failed":
                path.unlink()


def left_over(checkpoints: Path, token: str) -> tuple[str, ...]:
    """Return the names of folders in which attempts with other tokens made a checkpoint."""
    found = (path.name for path in checkpoints.glob(".step-*"))
    return tuple(name for name in found if not token or not name.endswith(token))


def clear(checkpoints: Path, names: Iterable[str]) -> None:
    """Remove such folders, while others may be giving them their names: so as a whole, or not."""
    for name in names:
        gone = checkpoints / f"{name}-old"
        with suppress(OSError):
            (checkpoints / name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def discard(checkpoints: Path) -> None:
    """Remove what an interrupted run left half-written or half-removed.

    What a process of it is still writing is waited for.
    """
    wait_for_writers(checkpoints)
    for hidden in (*checkpoints.glob(".step-*"), *checkpoints.glob(".best-*")):
        shutil.rmtree(hidden, ignore_errors=True)


# -- who writes -----------------------------------------------------------------------------------


def shared_lock(checkpoints: Path) -> int:
    """Return an open file by which `lock` and `unlock` tell others that something is written.

    Processes that inherit it hold the same lock; it ends when the last of them unlocks or dies.
    """
    checkpoints.mkdir(parents=True, exist_ok=True)
    return os.open(checkpoints, os.O_RDONLY | os.O_DIRECTORY)


def lock(handle: int) -> None:
    """Say that something is being written."""
    with suppress(OSError):  # file systems without locks, whose readers do not wait
        fcntl.flock(handle, fcntl.LOCK_SH)


def unlock(handle: int) -> None:
    """Say that it is there."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)


def wait_for_writers(checkpoints: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Return once no process writes a checkpoint there; after a minute in any case."""
    if not checkpoints.is_dir():
        return
    handle = shared_lock(checkpoints)
    try:
        for _ in range(int(_PATIENCE_S / _LOOK_S)):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sleep(_LOOK_S)
            except OSError:  # as in `lock`
                return
            else:
                return
    finally:
        os.close(handle)
