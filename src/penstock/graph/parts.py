"""Parts: how a run of the numbers of a tensor is called, in a graph as in a checkpoint.

And how the ops are that read a slice of a parameter: by their module, and which slice it is.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

_PART = re.compile(r"part (?P<start>\d+) of (?P<shape>[\dx]*)/(?P<key>.+)", re.DOTALL)
_SLICE = re.compile(r"(?:.+\.)?slice \d+ of \d+")


class PartName(NamedTuple):
    """The numbers from number `start` on of the tensor `key`, which has this shape whole."""

    key: str
    start: int
    shape: tuple[int, ...]


def part_key(key: str, start: int, shape: Sequence[int]) -> str:
    """Return the name of the part of tensor `key` that begins at number `start`."""
    return f"part {start} of {'x'.join(map(str, shape))}/{key}"


def part_in(name: str) -> PartName | None:
    """Return the tensor that `name` is a part of, with its start and shape; None: it is whole."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    words = found["shape"]
    shape = tuple(map(int, words.split("x"))) if words else ()
    return PartName(found["key"], int(found["start"]), shape)


def key_in(name: str) -> str:
    """Return the key of a tensor, where `name` is that of a part of it, or its own."""
    found = part_in(name)
    return name if found is None else found.key


def word_of(name: str) -> str:
    """Return one word for a tensor or a part of it, by which a sum of its gradients is named."""
    part = part_in(name)
    return name if part is None else f"{part.key}@{part.start}"


def slice_path(module: str, number: int, count: int) -> str:
    """Return the path of the ops of a module that read the slice `number` of `count`, from 0."""
    return f"{module}.slice {number + 1} of {count}".lstrip(".")


def slice_in(path: str) -> bool:
    """Return whether a path is that of ops that read one slice of a parameter."""
    return _SLICE.fullmatch(path) is not None
