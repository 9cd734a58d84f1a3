"""Finite: a loss, or the norm of a gradient, that is not finite ends a run on all ranks.

The rank that sees it writes down where, and the weights that it holds; so do, when they learn of
it, the others of its replica.  The process that leads the run finds out from these what happened
(see autopsy.py).
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import (
    load_file,  # pyright: ignore[reportUnknownVariableType]
    save_file,  # pyright: ignore[reportUnknownVariableType]
)
from torch import Tensor

from penstock.errors import CheckpointError, RunError
from penstock.files import read_json, write_text
from penstock.transport.transport import Transport, TransportError
from penstock.typed import damage, typed

_PATIENCE_S = 20.0  # for which the others are waited for
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class NotFinite:
    """What is not finite: the loss of a micro-batch, or the norm of a step's gradient.

    what:    in words, and its value.
    step:    counted from 0.
    indices: micro-batches of the job's data among which the first op is to be found.
    rank:    that saw it; ranks: those that hold the model as it did.
    """

    what: str
    value: str
    step: int
    indices: tuple[int, ...]
    rank: int = 0
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} is {self.value}"


class NotFiniteError(RunError):
    """A number that has to be finite is not."""

    def __init__(self, found: NotFinite) -> None:
        hint = "lower the learning rate, set Job.clip_norm, or look at the data of that micro-batch"
        super().__init__(str(found), hint=hint)
        self.found = found


def check_loss(value: float, step: int, place: int, index: int) -> None:
    """Raise unless the loss of a micro-batch is finite: `place` of its step, `index` of the data.

    Raises:   NotFiniteError.
    """
    if not math.isfinite(value):
        what = f"the loss of step {step + 1}, micro-batch {place} (number {index} of the data),"
        raise NotFiniteError(NotFinite(what, f"{value}", step, (index,)))


def refuse_loss(value: float, step: int, indices: Sequence[int]) -> None:
    """Raise for the mean loss of a step.

    Raises:   NotFiniteError.
    """
    raise NotFiniteError(
        NotFinite(f"the loss of step {step + 1}", f"{value}", step, tuple(indices))
    )


def refuse_norm(value: float, step: int, indices: Sequence[int], names: Sequence[str]) -> None:
    """Raise for the norm of a step's gradient; of the gradients, those of `names` are not finite.

    Raises:   NotFiniteError.
    """
    of = f" of {names[0]}" if names else ""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    what = f"the norm of the gradient{of}{more} in step {step + 1}"
    raise NotFiniteError(NotFinite(what, f"{value}", step, tuple(indices)))


def check_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise if a weight is nan after `step` steps: no checkpoint is written of such.

    Raises:   NotFiniteError.
    """
    for name, value in weights.items():
        if bool(value.sum().isnan()) and bool(value.isnan().any()):  # a sum is read once
            found = NotFinite(
                f"parameter {name}, after the update of step {step},", "nan", step, ()
            )
            raise NotFiniteError(found)


# -- what ranks leave -----------------------------------------------------------------------------


@contextmanager
def leaving(
    checkpoints: Path | None,
    transport: Transport,
    ranks: tuple[int, ...],
    held: Callable[[], Mapping[str, Tensor]],
) -> Generator[None]:
    """Have a rank leave what it holds where a number is not finite, here or on another rank.

    ranks:  those of its replica; held: its tensors, as in a checkpoint.
    """
    try:
        yield
    except NotFiniteError as problem:
        if checkpoints is not None:
            folder = _folder(checkpoints)
            with suppress(OSError, SafetensorError):  # the error itself is told in any case
                folder.mkdir(parents=True, exist_ok=True)
                _tell_first(folder, problem.found, transport.rank, ranks)
                _write(folder, transport.rank, held())
        transport.abort(str(problem))
        raise
    except TransportError:
        if checkpoints is not None:
            with suppress(OSError, SafetensorError, CheckpointError):
                found = _found(_folder(checkpoints))
                if found is not None and transport.rank in found.ranks:
                    _write(_folder(checkpoints), transport.rank, held())
        raise


def _tell_first(folder: Path, found: NotFinite, rank: int, ranks: tuple[int, ...]) -> None:
    """Write down what was found, unless another rank has already done so, perhaps just now."""
    own = folder / f".found-{rank}"
    write_text(own, json.dumps({**asdict(found), "rank": rank, "ranks": ranks}))
    with suppress(FileExistsError):
        os.link(own, folder / "found.json")
    own.unlink()


def _write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
    part = folder / f".rank-{rank}"
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, part)
    os.replace(part, folder / f"rank-{rank}.safetensors")


def _folder(checkpoints: Path) -> Path:
    return checkpoints / ".not-finite"


def _found(folder: Path) -> NotFinite | None:
    if not (folder / "found.json").exists():
        return None
    content = read_json(folder / "found.json", CheckpointError, "note")
    with damage(f"{folder / 'found.json'}", CheckpointError, hint=f"delete {folder}"):
        return typed(NotFinite, content)


def left(checkpoints: Path) -> tuple[NotFinite, dict[str, Tensor]] | None:
    """Return what ranks left about a number that is not finite, and remove it; None if nothing.

    Tensors that a rank could no longer write are missing.
    """
    folder = _folder(checkpoints)
    found = _found(folder)
    if found is None:
        return None
    parts = [folder / f"rank-{rank}.safetensors" for rank in found.ranks]
    until = time.monotonic() + _PATIENCE_S
    while not all(part.exists() for part in parts) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    tensors: dict[str, Tensor] = {}
    for part in parts:
        with suppress(OSError, SafetensorError):
            tensors |= load_file(part)
    forget(checkpoints)
    return found, tensors


def forget(checkpoints: Path) -> None:
    """Remove what ranks of an earlier run left."""
    shutil.rmtree(_folder(checkpoints), ignore_errors=True)


def all_finite(value: object) -> bool:
    """Return whether a value is not a float tensor, or one whose numbers are all finite."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value).all())
