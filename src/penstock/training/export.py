"""Export: the weights of a run as other programs read them, and back into a model.

A checkpoint names every parameter and buffer once, by its first name in the model.  A file for
`load_state_dict` names them as the model's own `state_dict` does: a tied weight under each of its
names, buffers that are not persistent left out.  Both are of the dtypes that were trained.
"""

import json
import os
import secrets
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor, nn

from penstock.checkpoints import checkpoint
from penstock.errors import CheckpointError, JobError
from penstock.graph.composed import AVERAGE, averaged
from penstock.graph.lasting import is_dense
from penstock.job import Job
from penstock.state.grown import resizable, resize_buffers
from penstock.state.python_state import EXTRA, extra_key, take_extra, with_extra
from penstock.state.values import OddError, Plain, Tensors, put_value
from penstock.step_places import CARRY

_OTHER = "is it the run of another model, or of an older version of its code?"


def load_weights(
    model: nn.Module, folder: Path | str, which: str | int = "latest", *, average: bool = False
) -> int:
    """Give `model` the weights and buffers of a run; return after how many steps they were saved.

    folder:   what `penstock train --out` wrote, or the folder of one checkpoint.
    which:    "latest", "best" or the number of steps.
    average:  whether to take the average of the weights (`Job.average`) in their place.

    As `load_state_dict(strict=True)`, values are converted to the model's dtypes.  A buffer that is
    not persistent is taken as well if it has the same shape in the checkpoint, else left alone.

    Raises:   CheckpointError: there is no such checkpoint, or it is of another model; the message
              names the first key that does not fit, and nothing has been loaded.
    """
    kept = checkpoint.load(chosen(Path(folder), which))
    kept = with_averages(kept, str(folder)) if average else kept
    with torch.no_grad():
        for own, found in _pairs(model, kept.tensors):
            own.copy_(found)
    resize_buffers(model, kept.tensors)
    take_extra(model, kept.tensors, kept.plain)
    return kept.step


def with_averages(kept: checkpoint.Checkpoint, place: str) -> checkpoint.Checkpoint:
    """Return a checkpoint with the averages of the weights in their place.

    Raises:   CheckpointError: it has none.
    """
    if not any(key.endswith(f"/{AVERAGE}") for key in kept.tensors):
        message = f"{place} holds no average of weights"
        raise CheckpointError(message, hint="train with Job.average, as ps.ema(0.999)")
    return kept._replace(tensors=averaged(kept.tensors))


def chosen(folder: Path, which: str | int = "latest") -> Path:
    """Return the folder of a checkpoint of a run: "latest", "best" or the number of steps.

    Raises:   CheckpointError: it is not there.
    """
    if (folder / "state.json").is_file() and which == "latest":
        return folder
    checkpoints = folder / "checkpoints"
    steps = checkpoint.steps_in(checkpoints)
    if not steps:
        hint = "give the folder of a run that has saved a checkpoint"
        raise CheckpointError(f"{folder} holds no checkpoint", hint=hint)
    if which == "latest":
        return checkpoint.folder_of(checkpoints, steps[-1])
    if which == "best":
        place = checkpoints / "best"
        if (place / "state.json").is_file():
            return place
        hint = f"give latest, or one of the steps {_listed(steps)}"
        raise CheckpointError(f"{folder} holds no best checkpoint", hint=hint)
    text = str(which)
    if not text.isdecimal():
        message = f"{text!r} names no checkpoint"
        raise CheckpointError(message, hint=f"give latest, best or a step of {_listed(steps)}")
    if int(text) not in steps:
        message = f"{folder} holds no checkpoint after step {int(text)}"
        raise CheckpointError(message, hint=f"give latest, best or a step of {_listed(steps)}")
    return checkpoint.folder_of(checkpoints, int(text))


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps))


def trained(job: Job, kept: checkpoint.Checkpoint) -> nn.Module:
    """Return the job's model on the CPU, with the weights of a checkpoint in their own dtypes.

    It is its author's: without what micro-batches hand on.
    Raises:   CheckpointError: it is of another model; the message names the first key.
    """
    torch.manual_seed(job.seed)  # pyright: ignore[reportUnknownMemberType]
    model = replace(job, carry=None).model()
    for own, found in _pairs(model, kept.tensors):
        own.data = found
    resize_buffers(model, kept.tensors)
    take_extra(model, kept.tensors, kept.plain)
    return model


def _pairs(model: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor of the model beside that of the checkpoint, but those to be resized.

    Raises:   CheckpointError: a key is missing, too much or of another shape.
    """
    own = {f"weights/{name}": value for name, value in model.named_parameters()}
    own |= {f"buffers/{name}": b for name, b in model.named_buffers() if is_dense(b)}
    saved = {key for key in tensors if key.startswith(("weights/", "buffers/"))}
    saved -= {key for key in saved if key.startswith(f"buffers/{CARRY}.")}
    resized = {f"buffers/{name}" for name in resizable(model, tensors)}
    own, saved = {k: value for k, value in own.items() if k not in resized}, saved - resized
    fleeting = _fleeting(model)
    pairs: list[tuple[Tensor, Tensor]] = []
    for key, value in own.items():
        found = tensors.get(key)
        if found is not None and found.shape == value.shape:
            pairs.append((value, found))
        elif key not in fleeting:
            held = "is not there" if found is None else f"is {list(found.shape)}"
            message = f"{key} {held} in the checkpoint, {list(value.shape)} in the model"
            raise CheckpointError(message, hint=_OTHER)
    for key in sorted(saved - own.keys()):
        message = f"{key} is {list(tensors[key].shape)} in the checkpoint, not there in the model"
        raise CheckpointError(message, hint=_OTHER)
    return pairs


def _fleeting(model: nn.Module) -> set[str]:
    """Return the keys of the buffers that are not persistent."""
    lasting = model.state_dict().keys()
    return {f"buffers/{name}" for name, _ in model.named_buffers() if name not in lasting}


def save_state(model: nn.Module, path: Path) -> list[str]:
    """Write the model's `state_dict` as one file of safetensors; return what was left out of it.

    That is the sparse buffers: the model builds them, and no run changes them.
    What `get_extra_state` returns, if that is no tensor, is taken apart: tensors in it are beside
    the others, the rest is JSON in the file's metadata.  `weights` gives it back.
    Raises:   JobError: it holds something else.
              CheckpointError, OSError: no room or no permission; nothing half-written is left.
    """
    state: dict[str, Any] = model.state_dict()
    extra = _taken_apart(model, state)
    sparse = [n for n, b in model.named_buffers() if n in state and not is_dense(b)]
    state = {key: value for key, value in state.items() if key not in sparse}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            message = f"the model's state_dict holds {key}, a {type(value).__name__}"
            raise JobError(message, hint="a safetensors file holds only dense tensors")
    with _renamed(path) as part:
        copies = {key: value.detach().clone().contiguous() for key, value in state.items()}
        save_file(copies, part, metadata={"format": "pt", **extra})
        with part.open("rb") as file:
            os.fsync(file.fileno())
    return sparse


def _taken_apart(model: nn.Module, state: dict[str, Any]) -> dict[str, str]:
    """Put the tensors of extra state into `state`; return what is left of it, as metadata.

    Raises:   JobError: something of it cannot be saved.
    """
    plain: Plain = {}
    for name, _ in with_extra(model):
        tensors: Tensors = {}
        key = extra_key(name)
        try:
            put_value(key, state.pop(key), tensors, plain)
        except OddError as odd:
            message = f"the model's state_dict holds {key}, and in it a {odd}"
            hint = "let it be tensors, numbers and text, in lists, tuples and dicts"
            raise JobError(message, hint=hint) from None
        state |= tensors
    return {EXTRA: json.dumps(plain)} if plain else {}


def save_pretrained(model: nn.Module, folder: Path) -> list[str]:
    """Write what the `from_pretrained` of the model's class reads: configuration and weights.
    Nothing of it is left out.

    Other files of the folder stay as they are; weights of an earlier export are replaced.

    Raises:   JobError: the model has no `save_pretrained`.
              CheckpointError, OSError: no room or no permission; nothing half-written is left.
    """
    save: Any = getattr(model, "save_pretrained", None)
    if not callable(save):
        message = f"the job's model, a {type(model).__name__}, has no save_pretrained"
        raise JobError(message, hint='give to="FILE.safetensors" for its state_dict')
    with _renamed(folder) as part:
        save(part)
    return []


@contextmanager
def _renamed(place: Path) -> Generator[Path]:
    """Give a name beside `place` to write to; what is there at the end is renamed to `place`."""
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.parent / f".{secrets.token_hex(8)}.part"
    try:
        yield part
        if part.is_dir() and place.is_dir():
            _move_into(part, place)
        else:
            part.replace(place)
    except SafetensorError as problem:
        hint = "free some space, or choose another place; nothing half-written was left"
        raise CheckpointError(f"cannot write {place}: {problem}", hint=hint) from problem
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if not part.is_dir():
            part.unlink(missing_ok=True)


def _move_into(part: Path, folder: Path) -> None:
    """Move the files of `part` into `folder`; weights there that `part` has no file for go."""
    names = {path.name for path in part.iterdir()}
    for name in sorted(names):
        (part / name).replace(folder / name)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
