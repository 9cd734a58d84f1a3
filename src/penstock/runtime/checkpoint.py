"""Checkpoints: a folder with the whole state by parameter name, independent of the plan.

    step-000100/  state.json        step, names of the parts, the optimizer's plain values by key
                  rank-0.safetensors, rank-1.safetensors, ...    tensors by key

Every rank of the first replica writes its own part into a hidden folder; when all are done one
rank writes state.json and renames the folder.  A folder with that name is complete, whatever is
killed when.  Ranks on several hosts need a folder that all of them see.
"""

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.files import read_json, write_text
from penstock.runtime.parts import key_in, whole
from penstock.typed import Endless, damage, typed

_NAME = re.compile(r"step-(\d{6,})")


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


@dataclass(frozen=True, slots=True)
class _BestFile:
    """What best.json holds."""

    step: int
    val_loss: Endless


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder for the state after `step` finished steps."""
    return checkpoints / f"step-{step:06d}"


def write_part(
    checkpoints: Path,
    step: int,
    rank: int,
    state: tuple[Mapping[str, Tensor], Mapping[str, object]],
) -> None:
    """Write tensors and plain values of one rank into the hidden folder of a checkpoint.

    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    folder, (tensors, plain) = _hidden(checkpoints, step), state
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"rank-{rank}.safetensors"
        dense = {key: value.detach().to_dense() for key, value in tensors.items()}
        save_file({key: value.contiguous().clone() for key, value in dense.items()}, path)
        _flush(path)
        write_text(folder / f"rank-{rank}.json", json.dumps(dict(plain)))


def finish(checkpoints: Path, step: int) -> Path:
    """Join what the ranks wrote and give the folder its name; call it when all have written.

    Raises:   CheckpointError: the disk is full, or the folder cannot be written.
    """
    hidden, folder = _hidden(checkpoints, step), folder_of(checkpoints, step)
    with _writing(hidden):
        plain: dict[str, object] = {}
        for part in sorted(hidden.glob("rank-*.json")):
            plain |= read_json(part, CheckpointError, "checkpoint part")
            part.unlink()
        parts = sorted(part.name for part in hidden.glob("rank-*.safetensors"))
        content = {"step": step, "parts": parts, "plain": plain}
        write_text(hidden / "state.json", json.dumps(content))
        if folder.exists():
            _remove(folder)
        hidden.rename(folder)
        _flush(checkpoints)
    return folder


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except (SafetensorError, OSError) as problem:
        hint = "free some space, or choose another place; earlier checkpoints are intact"
        raise CheckpointError(
            f"cannot write checkpoint {folder}: {problem}", hint=hint
        ) from problem


def _flush(path: Path) -> None:
    """Return once a file, or the names in a folder, would survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def discard(checkpoints: Path) -> None:
    """Remove what an interrupted run left half-written or half-removed."""
    for hidden in (*checkpoints.glob(".step-*"), *checkpoints.glob(".best-*")):
        shutil.rmtree(hidden, ignore_errors=True)


def latest(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = _complete(checkpoints)
    return found[-1] if found else None


def steps_in(checkpoints: Path) -> list[int]:
    """Return the steps of all complete checkpoints of a run, the oldest first."""
    return [int(path.name.removeprefix("step-")) for path in _complete(checkpoints)]


def keep_newest(checkpoints: Path, count: int = 2) -> None:
    """Remove all but the newest `count` checkpoints."""
    for old in _complete(checkpoints)[:-count]:
        _remove(old)


def keep_best(checkpoints: Path, step: int, value: float) -> None:
    """Keep the checkpoint after `step` steps as the best one, if no earlier value was lower.

    Its files are the same ones under other names, so it costs no room while both are there.
    Raises:   CheckpointError: the folder cannot be written.
    """
    known = best(checkpoints)
    if known is not None and known[1] <= value:
        return
    new, folder = checkpoints / ".best-new", checkpoints / "best"
    with _writing(folder):
        shutil.rmtree(new, ignore_errors=True)
        shutil.copytree(folder_of(checkpoints, step), new, copy_function=_link)
        write_text(new / "best.json", json.dumps({"step": step, "val_loss": value}))
        if folder.exists():
            _remove(folder)
        new.rename(folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def best(checkpoints: Path) -> tuple[int, float] | None:
    """Return after how many steps the best checkpoint was, and its validation loss.

    Raises:   CheckpointError: its note is damaged.
    """
    path = checkpoints / "best" / "best.json"
    if not path.exists():
        return None
    told = read_json(path, CheckpointError, "note of the best checkpoint")
    with damage(f"{path}", CheckpointError, hint=f"delete {path.parent}"):
        best = typed(_BestFile, told)
    return best.step, best.val_loss


def _complete(checkpoints: Path) -> list[Path]:
    """Return all complete checkpoints, the oldest first."""
    named = {p: m for p in checkpoints.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    return sorted(
        (path for path in named if (path / "state.json").exists()),
        key=lambda path: int(named[path][1]),
    )


def _remove(folder: Path) -> None:
    """Remove a checkpoint so that it is never seen in part: under another name."""
    gone = folder.with_name(f".{folder.name}-old")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


class _Unread(Mapping[str, Tensor]):
    """Tensors of files, each read on request, and not kept."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self.places: defaultdict[str, dict[str, Path]] = defaultdict(dict)
        for part in parts:
            for name in _opened(part).keys():  # noqa: SIM118 - it is no dict
                self.places[key_in(name)][name] = part

    def __getitem__(self, key: str) -> Tensor:
        if key not in self.places:
            raise KeyError(key)
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
    return Checkpoint(state.step, _Unread([folder / name for name in state.parts]), state.plain)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:   CheckpointError: a file is missing, truncated or damaged.
    """
    state = _state(folder)
    tensors: dict[str, Tensor] = {}
    for part in (folder / name for name in state.parts):
        try:
            if part.exists() and not part.is_file():  # a pipe never ends
                raise IsADirectoryError("no regular file")
            tensors |= load_file(part)
        except (SafetensorError, OSError, ValueError) as problem:
            message = f"checkpoint file {part} is missing or damaged: {problem}"
            raise CheckpointError(message, hint=_to_older(folder)) from problem
    return Checkpoint(state.step, whole(tensors), state.plain)


def _state(folder: Path) -> _StateFile:
    path = folder / "state.json"
    content = read_json(path, CheckpointError, "checkpoint")
    with damage(f"checkpoint {path}", CheckpointError, hint=_to_older(folder)):
        return typed(_StateFile, content)


def _to_older(folder: Path) -> str:
    return f"delete {folder} to resume from an older checkpoint"


def _hidden(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".step-{step:06d}"
