"""Imported: a model that begins with weights of a file or folder of safetensors, by its own names.

    F.safetensors                     one file
    FOLDER/model.safetensors          what `save_pretrained` writes
    FOLDER/model.safetensors.index.json, model-00001-of-00003.safetensors, ...    in several files

Names are those of the model's `state_dict`.  Of tied weights one name is enough.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.files import read_json
from penstock.job import Job
from penstock.state.python_state import EXTRA, extra_key, with_extra
from penstock.state.values import take_value
from penstock.typed import damage, typed

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MOST_LISTED = 6


@dataclass(frozen=True, slots=True)
class _IndexFile:
    """What an index says: in which file each tensor is."""

    weight_map: dict[str, str]


def beginning_with(job: Job, place: Path | str) -> Job:
    """Return a job whose model begins with the weights in `place`, and else as before.

    Raises:   CheckpointError: there are none; when the model is built: they are of another model.
    """
    named = _files(Path(place))
    files = {str(Path(file).absolute()): names for file, names in named.items()}

    def model() -> nn.Module:
        built = job.model()
        held: Mapping[str, Any] = built.state_dict()
        if not any(isinstance(value, Tensor) and value.is_meta for value in held.values()):
            _give(built, files, Path(place))
        return built

    return replace(job, model=model)


def _files(place: Path) -> dict[str, list[str]]:
    """Return the names of the tensors in each file, by the path of the file.

    Raises:   CheckpointError: there is none, or one is damaged.
    """
    if place.is_dir():
        if (place / _INDEX).is_file():
            return _indexed(place)
        found = [place / _ONE] if (place / _ONE).is_file() else sorted(place.glob("*.safetensors"))
        if len(found) != 1:
            what = f"{len(found)} files of safetensors, and no {_INDEX}" if found else "no weights"
            raise CheckpointError(f"{place} holds {what}", hint=f"give a folder with {_ONE}")
        place = found[0]
    if place.suffix in _PICKLES:
        hint = "write it as safetensors where it comes from: safetensors.torch.save_file"
        raise CheckpointError(f"{place} is pickled, and may run code when it is read", hint=hint)
    if not place.is_file():
        hint = "give F.safetensors, or a folder as save_pretrained writes it"
        raise CheckpointError(f"there are no weights in {place}", hint=hint)
    with _opened(place) as file:
        return {str(place): list(file.keys())}


def _indexed(place: Path) -> dict[str, list[str]]:
    index = place / _INDEX
    hint = "fetch the folder again"
    with damage(f"{index}", CheckpointError, hint=hint):
        listed = typed(_IndexFile, read_json(index, CheckpointError, "index"), more=True)
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, file in listed.weight_map.items():
        if Path(file).name != file or not (place / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is not there", hint=hint)
        found[str(place / file)].append(name)
    return dict(found)


def _opened(path: Path) -> Any:  # safetensors has no types
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as problem:
        raise CheckpointError(f"cannot read {path}: {problem}", hint="fetch it again") from problem


def _give(model: nn.Module, files: Mapping[str, Sequence[str]], place: Path) -> None:
    """Copy the tensors of `files` into the model, in its own dtypes.

    Raises:   CheckpointError: names are missing or too many, or shapes differ; all are listed.
    """
    state: Mapping[str, Any] = model.state_dict(keep_vars=True)
    extras = {extra_key(name): module for name, module in with_extra(model)}
    own = {n: v for n, v in state.items() if isinstance(v, Tensor) and n not in extras}
    more = {name: value for name, value in model.named_buffers() if name not in own}
    given = {name for names in files.values() for name in names}
    held = {_memory(own[name]) for name in given & own.keys()}
    missing = [name for name in own if name not in given and _memory(own[name]) not in held]
    parts = {name for name in given if name.partition("/")[0] in extras}
    unknown = sorted(given - own.keys() - more.keys() - parts)
    if missing or unknown:
        raise _misfit(missing, unknown, place)
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, value in _read(files):
            if name in parts:
                tensors[name] = value
            target = own.get(name)
            if target is None:  # a buffer that the model makes itself
                continue
            if target.shape != value.shape:
                message = f"{name} is {list(value.shape)} in {place}, {list(target.shape)} in the"
                raise CheckpointError(f"{message} model", hint="is it of another size?")
            target.copy_(value)
    plain = _extra_in(files) if extras else {}
    for key, module in extras.items():
        if key in {*tensors, *plain}:
            module.set_extra_state(take_value(key, tensors, plain))


def _extra_in(files: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return what is kept in the metadata of `files` of extra state, by key."""
    found: dict[str, Any] = {}
    for path in files:
        with _opened(Path(path)) as file:
            told: dict[str, str] = file.metadata() or {}
        with damage(path, CheckpointError, hint="export it again"):
            found |= typed(dict[str, Any], json.loads(told.get(EXTRA, "{}")))
    return found


def _read(files: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, Tensor]]:
    for path, names in files.items():
        with _opened(Path(path)) as file:
            for name in names:
                try:
                    yield name, file.get_tensor(name)
                except SafetensorError as problem:
                    message = f"{path} holds no whole {name}: {problem}"
                    raise CheckpointError(message, hint="fetch it again") from problem


def _memory(value: Tensor) -> tuple[int, int]:
    """Return what is the same for tied weights only."""
    return id(value) if value.numel() == 0 else value.data_ptr(), value.numel()


def _misfit(missing: Sequence[str], unknown: Sequence[str], place: Path) -> CheckpointError:
    parts = [f"{place} does not fit the model"]
    if missing:
        parts.append(f"  missing:  {_listed(missing)}")
    if unknown:
        parts.append(f"  not of the model:  {_listed(unknown)}")
    hint = "is it of another model, or of its base without the head?"
    for name in unknown:
        inner = [own for own in missing if own.endswith(f".{name}") or name.endswith(f".{own}")]
        if inner:
            hint = f"{name} may be {inner[0]}: give the file of the same class of model"
            break
    return CheckpointError("\n".join(parts), hint=hint)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_LISTED
    return ", ".join(names[:_MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
