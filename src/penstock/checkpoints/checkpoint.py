"""Checkpoints: a folder with the whole state by parameter name, independent of the plan.

    step-000100/  state.json        step, names of the parts, the optimizer's plain values by key
                  rank-0.safetensors, rank-1.safetensors, ...    tensors by key

Every rank of the first replica writes its own part into a hidden folder; when all are done one
rank writes state.json and renames the folder (folders.py).  A folder with that name is complete,
whatever is killed when.  Ranks on several hosts need a folder that all of them see.
"""

import json
import mmap
import os
import shutil
import struct
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor

from penstock.best import LOWEST, best_of
from penstock.checkpoints.folders import (
    complete,
    digest_of,
    hidden_of,
    link,
    put_part,
    remove,
    step_of,
    wait_for_writers,
    writing,
)
from penstock.checkpoints.folders import discard as discard
from penstock.checkpoints.folders import finish as finish
from penstock.checkpoints.folders import folder_of as folder_of
from penstock.checkpoints.folders import is_named as is_named
from penstock.checkpoints.folders import latest as latest
from penstock.checkpoints.folders import steps_in as steps_in
from penstock.checkpoints.folders import tidy as tidy
from penstock.checkpoints.part_file import check
from penstock.checkpoints.snapshot import bytes_of, described
from penstock.errors import CheckpointError
from penstock.files import read_json, write_text
from penstock.state.replica_keys import as_one, keys_for, one_of, replicas_in
from penstock.state.tensor_parts import key_in, whole
from penstock.typed import Endless, damage, typed

UNREADABLE = (  # what reading bytes of others comes to
    SafetensorError,
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RuntimeError,  # also of recursion, and of torch
    struct.error,
)


class Checkpoint(NamedTuple):
    """What a checkpoint holds: the number of finished steps, tensors and plain values by key."""

    step: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class _StateFile:
    """What state.json holds."""

    step: int
    parts: tuple[str, ...]
    plain: dict[str, Any]
    checksums: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    digest: str = ""


@dataclass(frozen=True, slots=True)
class _BestFile:
    """What best.json holds.

    val_loss:  the figure that `best` names, whichever it is.
    """

    step: int
    val_loss: Endless
    best: str = LOWEST


def write_part(
    checkpoints: Path,
    step: int,
    rank: int,
    state: tuple[Mapping[str, Tensor], Mapping[str, object]],
    token: str = "",
) -> None:
    """Write tensors and plain values of one rank into the hidden folder of a checkpoint.

    token:    of the attempt.
    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    tensors, plain = state
    pieces = described(tensors)
    blocks = (bytes_of(tensors[piece.key]) for piece in pieces)
    put_part(hidden_of(checkpoints, step, token), rank, pieces, blocks, plain)


def keep_best(checkpoints: Path, step: int, value: float, best_by: str = LOWEST) -> None:
    """Keep the checkpoint after `step` steps as the best one, if no earlier value was as good.

    Its files are the same ones under other names, so it costs no room while both are there.
    best_by:  which value that is, and which way is better.
    Raises:   CheckpointError: the folder cannot be written.
    """
    known = best(checkpoints, best_by)
    if known is not None and not best_of(best_by).is_better(value, known[1]):
        return
    new, folder = checkpoints / ".best-new", checkpoints / "best"
    with writing(folder):
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(folder_of(checkpoints, step), new, copy_function=link)
        note: dict[str, Any] = {"step": step, "val_loss": value}
        write_text(new / "best.json", json.dumps(note | {"best": best_by}))
        if folder.exists():
            remove(folder)
        new.rename(folder)


def best(checkpoints: Path, best_by: str | None = None) -> tuple[int, float] | None:
    """Return after how many steps the best checkpoint was, and its value, as a rule `val_loss`.

    best_by:  None where there is one that is best by another figure.
    Raises:   CheckpointError: its note is damaged.
    """
    path = checkpoints / "best" / "best.json"
    if not path.exists():
        return None
    told = read_json(path, CheckpointError, "note of the best checkpoint")
    with damage(f"{path}", CheckpointError, hint=f"delete {path.parent}"):
        found = typed(_BestFile, told)
    return None if best_by not in (None, found.best) else (found.step, found.val_loss)


class Unread(Mapping[str, Tensor]):
    """Tensors of files, each read on request, and not kept."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.places: defaultdict[str, dict[str, Path]] = defaultdict(dict)
        for part in parts:
            for name in _opened(part).keys():  # noqa: SIM118 - it is no dict
                self.places[key_in(name)][name] = part
        self.replicas = replicas_in(self.places)

    @property
    def divided(self) -> tuple[str, ...]:
        """Return the keys of which there are parts."""
        return tuple(key for key, row in self.places.items() if row.keys() != {key})

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.places:
            raise KeyError(key)
        if key.startswith("weights/") and self.replicas > 1:
            wanted = [each for each in keys_for(key, self.replicas) if each in self.places]
            return one_of({each: self.raw(each) for each in wanted}, key, self.replicas)
        return self.raw(key)

    def raw(self, key: str) -> Tensor:
        """Return what the files have under a key: of weights, those of one replica."""
        rows = self.places[key].items()
        return whole({name: _opened(part).get_tensor(name) for name, part in rows})[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def _opened(part: Path) -> Any:  # safetensors has no types; its file ends with the object
    return safe_open(part, "pt")


def unread(folder: Path) -> Checkpoint:
    """Return a checkpoint whose tensors are read one by one, on request.

    For one that this very run has written: a damaged file is found late.
    """
    state = _state(folder)
    return Checkpoint(state.step, unread_tensors(folder), state.plain)


def unread_tensors(folder: Path) -> Unread:
    """Return the tensors of a checkpoint, each read on request."""
    return Unread(_parts_of(folder, _state(folder)))


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:   CheckpointError: a file is missing, truncated or damaged: the message names it, and
              the tensor of which a byte has changed.
    """
    state = _state(folder)
    tensors: dict[str, Tensor] = {}
    for part in _parts_of(folder, state):
        with _reading(part, folder):
            if part.exists() and not part.is_file():  # a pipe never ends
                raise IsADirectoryError("no regular file")
            if part.name in state.checksums:
                _check(part, state.checksums[part.name])
            tensors |= load_file(part)
    with _reading(folder, folder):
        return Checkpoint(state.step, as_one(whole(tensors)), state.plain)


@contextmanager
def _reading(file: Path, folder: Path) -> Generator[None]:
    """Raise whatever comes of reading a file that is not as it was written as one error.

    Raises:   CheckpointError.
    """
    try:
        yield
    except UNREADABLE as problem:
        words = f"{problem}" or type(problem).__name__
        message = f"checkpoint file {file} is missing or damaged: {words}"
        raise CheckpointError(message, hint=_to_older(folder)) from problem


@contextmanager
def putting_back(step: int) -> Generator[None]:
    """Raise whatever comes of values that are not of the kind that was saved as one error.

    Raises:   CheckpointError.
    """
    try:
        yield
    except UNREADABLE as problem:
        words = f"{type(problem).__name__}: {problem}"
        message = f"the checkpoint after {step} steps does not fit the job: {words}"
        raise CheckpointError(message, hint="delete it to resume from an older one") from problem


def _parts_of(folder: Path, state: _StateFile) -> list[Path]:
    """Return the files of a checkpoint's parts, all of which are inside its folder.

    Raises:   CheckpointError: one is named that is elsewhere.
    """
    parts = [folder / name for name in state.parts]
    for part, name in zip(parts, state.parts, strict=True):
        is_name = name == part.name and "\0" not in name
        if not is_name or part.resolve().parent != folder.resolve():
            message = f"checkpoint {folder} is damaged: its part {name!r} is not inside it"
            raise CheckpointError(message, hint=_to_older(folder))
    return parts


def newest_whole(
    checkpoints: Path, say: Callable[[str], None] = lambda words: None
) -> tuple[Path, int] | None:
    """Return the newest checkpoint that is not damaged, and its step; None where there is none.

    What is still being written is waited for.
    say:      told of each newer one why it is not taken.
    Raises:   CheckpointError: all are damaged; it is that of the newest.
    """
    wait_for_writers(checkpoints)
    problems: list[CheckpointError] = []
    for folder in reversed(complete(checkpoints)):
        try:
            found = folder, load(folder).step
        except CheckpointError as problem:
            problems.append(problem)
        else:
            for problem in problems:
                say(f"{problem.message}: going back to {folder.name}")
            return found
    if problems:
        raise problems[0]
    return None


def set_aside(checkpoints: Path, after: int, why: str = "damaged") -> list[Path]:
    """Give checkpoints after more than `after` steps a name that is not looked for.

    why:      what they are, which the name begins with.
    Return their new names.
    """
    newer = [folder for folder in complete(checkpoints) if step_of(folder) > after]
    names = [folder.with_name(f"{why}-{folder.name}") for folder in newer]
    for folder, name in zip(newer, names, strict=True):
        shutil.rmtree(name, ignore_errors=True)
        folder.rename(name)
    return names


def _check(part: Path, sums: Mapping[str, str]) -> None:
    with part.open("rb") as file, _mapped(file.fileno()) as content:
        check(f"{part}", content, sums, hint=_to_older(part.parent))


def _mapped(file: int) -> memoryview:
    """Return the content of a file, which is read as it is looked at."""
    size = os.fstat(file).st_size
    return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ)) if size else memoryview(b"")


def _state(folder: Path) -> _StateFile:
    path = folder / "state.json"
    with _reading(path, folder):
        content = read_json(path, CheckpointError, "checkpoint")
        with damage(f"checkpoint {path}", CheckpointError, hint=_to_older(folder)):
            state = typed(_StateFile, content)
        rest = {name: value for name, value in content.items() if name != "digest"}
        is_other = bool(state.digest) and state.digest != digest_of(rest)
    named = folder_of(folder.parent, state.step).name
    if is_other:
        message = f"checkpoint {path} is damaged: it is not what was written"
        raise CheckpointError(message, hint=_to_older(folder))
    if state.step < 0 or (is_named(folder) and folder.name != named):
        message = f"checkpoint {path} is damaged: it is of step {state.step}"
        raise CheckpointError(message, hint=_to_older(folder))
    return state


def _to_older(folder: Path) -> str:
    return f"delete {folder} to resume from an older checkpoint"
