"""Checkpoints: a folder with the whole state by parameter name, independent of the plan.

    step-000100/  state.json        step, and the optimizer's plain values by key
                  rank-0.safetensors, rank-1.safetensors, ...    tensors by key

Every rank of the first replica writes its own file into a hidden folder; when all are done
one rank writes state.json and renames the folder.  A folder with that name is complete.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.files import read_json, write_text

_NAME = re.compile(r"step-(\d{6,})")


class Checkpoint(NamedTuple):
    """What a checkpoint holds: the number of finished steps, tensors and plain values by key."""

    step: int
    tensors: Mapping[str, Tensor]
    plain: Mapping[str, object]


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder for the state after `step` finished steps."""
    return checkpoints / f"step-{step:06d}"


def write_part(
    checkpoints: Path, step: int, rank: int, tensors: Mapping[str, Tensor], plain: Mapping[str, object]
) -> None:
    """Write the part of one rank into the hidden folder of a checkpoint that is being made."""
    folder = _hidden(checkpoints, step)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(contiguous, folder / f"rank-{rank}.safetensors")
    write_text(folder / f"rank-{rank}.json", json.dumps(dict(plain)))


def finish(checkpoints: Path, step: int) -> Path:
    """Join what the ranks wrote and give the folder its name; call it when all have written."""
    hidden, folder = _hidden(checkpoints, step), folder_of(checkpoints, step)
    plain: dict[str, object] = {}
    for part in sorted(hidden.glob("rank-*.json")):
        plain |= read_json(part, CheckpointError, "checkpoint part")
        part.unlink()
    write_text(hidden / "state.json", json.dumps({"step": step, "plain": plain}))
    if folder.exists():
        shutil.rmtree(folder)
    hidden.rename(folder)
    return folder


def discard(checkpoints: Path) -> None:
    """Remove what an interrupted run left half-written."""
    for hidden in checkpoints.glob(".step-*"):
        shutil.rmtree(hidden, ignore_errors=True)


def latest(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    found = {int(m[1]): p for p in checkpoints.glob("step-*") if (m := _NAME.fullmatch(p.name))}
    complete = {step: path for step, path in found.items() if (path / "state.json").exists()}
    return complete[max(complete)] if complete else None


def keep_newest(checkpoints: Path, count: int = 2) -> None:
    """Remove all but the newest `count` checkpoints."""
    found = sorted(p for p in checkpoints.glob("step-*") if _NAME.fullmatch(p.name))
    for old in found[:-count]:
        shutil.rmtree(old)


def load(folder: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:   CheckpointError: a file is missing, truncated or damaged.
    """
    content = read_json(folder / "state.json", CheckpointError, "checkpoint")
    step, plain = content.get("step"), content.get("plain")
    parts = sorted(folder.glob("rank-*.safetensors"))
    if not isinstance(step, int) or not isinstance(plain, dict) or not parts:
        hint = "delete the folder to resume from an older one"
        raise CheckpointError(f"checkpoint {folder} is incomplete", hint=hint)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        try:
            tensors |= load_file(part)
        except (SafetensorError, OSError) as problem:
            hint = f"delete {folder} to resume from an older checkpoint"
            raise CheckpointError(f"checkpoint file {part} is damaged: {problem}", hint=hint) from problem
    return Checkpoint(step, tensors, plain)


def _hidden(checkpoints: Path, step: int) -> Path:
    return checkpoints / f".step-{step:06d}"
