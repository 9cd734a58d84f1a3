"""Lengths: how long the samples of a dataset are, and what stands behind their ends.

A sample is a sequence (a tensor, a list or an array with one place for each token), or a dict,
tuple or list of such fields.  Its length is that of its first field unless a function says it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.batches.how import named, own_random, seed_all
from penstock.errors import JobError

Length = Callable[[Any], Any]
Pad = float | Mapping[str, float]
IGNORED = -100  # as torch's cross entropy has it
LABELS = ("labels", "targets")  # which are padded by that unless `pad` names them


def lengths_of(dataset: Any, length: Length | Sequence[Any] | None, seed: int) -> list[Any]:
    """Return the length of each sample, as it is given or as a function or its field says.

    Raises:   JobError: the dataset has no samples by number, or other lengths are given than it
              has samples.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        hint = "pass what has __len__ and __getitem__: lengths are looked at before the first step"
        raise JobError(f"{named(dataset)} does not give its samples by number", hint=hint)
    count = len(dataset)
    if not count:
        raise JobError(f"{named(dataset)} is empty", hint="check where it reads its samples from")
    if length is not None and not callable(length):
        given = list(length)
        if len(given) != count:
            hint = "give one length for each sample, or a function of a sample"
            message = f"{len(given):,} lengths are given, and {named(dataset)} has {count:,}"
            raise JobError(f"{message} samples", hint=hint)
        return given
    with own_random():
        found: list[Any] = []
        for number in range(count):
            seed_all(seed, "length", number)
            found.append((length or length_in)(dataset[number]))
        return found


def length_in(sample: Any) -> int:
    """Return the length of a sample: that of its first field.

    Raises:   JobError: the field has none.
    """
    first = next(iter(_fields(sample)), sample)
    try:
        return len(first)
    except TypeError as problem:
        message = f"a sample begins with the {type(first).__name__} {str(first)[:40]}"
        hint = "say how long a sample is: length=lambda sample: len(sample['input_ids'])"
        raise JobError(f"{message}, which has no length", hint=hint) from problem


def _fields(sample: Any) -> Iterable[Any]:
    if isinstance(sample, Mapping):
        return cast("Mapping[str, Any]", sample).values()
    return cast("tuple[Any, ...]", sample) if isinstance(sample, tuple) else ()


def pad_of(pad: Pad, name: str) -> float:
    """Return what stands behind the end of a field."""
    if isinstance(pad, Mapping):
        return pad.get(name, IGNORED if name in LABELS else 0)
    return IGNORED if name in LABELS else pad


def as_row(values: Any) -> Tensor:
    """Return the values of a field as a tensor; text and the like raise a TypeError."""
    if isinstance(values, Tensor):
        return values
    return torch.as_tensor(np.asarray(values))


def lengthened(row: Tensor, length: int, value: float) -> Tensor:
    """Return a copy of a row that is `length` places long, `value` behind its end."""
    longer = row.new_full((length, *row.shape[1:]), value)
    longer[: len(row)] = row
    return longer


def padded(sample: Any, own: int, length: int, pad: Pad) -> Any:
    """Return a sample whose fields of `own` places have `length`.

    A field is one of those whose first dimension is `own`; where `pad` names fields, those.
    """
    if isinstance(sample, Mapping):
        fields = cast("Mapping[str, Any]", sample)
        return {
            name: lengthened(as_row(value), length, pad_of(pad, name))
            if (name in pad if isinstance(pad, Mapping) else _is_of(value, own))
            else value
            for name, value in fields.items()
        }
    value = pad_of(pad, "")
    if isinstance(sample, tuple):
        return tuple(
            lengthened(as_row(field), length, value) if _is_of(field, own) else field
            for field in cast("tuple[Any, ...]", sample)
        )
    return lengthened(as_row(sample), length, value)


def _is_of(field: Any, length: int) -> bool:
    """Return whether a field has one place for each of `length` tokens."""
    if isinstance(field, str | bytes) or not hasattr(field, "__len__"):
        return False
    return getattr(field, "ndim", 1) > 0 and len(field) == length
