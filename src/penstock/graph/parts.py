"""Parts: how a run of the numbers of a tensor is called, in a graph as in a checkpoint.

And how the ops are that read a slice of a parameter: by their module, and which slice it is.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

_PART = re.compile(
    r"part (?P<start>\d+) of (?P<shape>[\dx]*)(?: by (?P<order>\d+x\d+))?/(?P<key>.+)", re.DOTALL
)
_SLICE = re.compile(r"(?:.+\.)?slice \d+ of \d+")


class PartName(NamedTuple):
    """The numbers from number `start` on of the tensor `key`, which has this shape whole.

    order:  (a, b): they are numbered as [b, a, ...] has them, where the tensor is [a, b, ...]; so
            that each of b ranks has one part, though its slice is of a dim behind others.
    """

    key: str
    start: int
    shape: tuple[int, ...]
    order: tuple[int, int] | None = None

    @property
    def ranks(self) -> int:
        """Return the number of parts; 1 where the tensor is not divided by an order."""
        return 1 if self.order is None else self.order[1]


def part_key(
    key: str, start: int, shape: Sequence[int], order: tuple[int, int] | None = None
) -> str:
    """Return the name of the part of tensor `key` that begins at number `start`."""
    by = f" by {order[0]}x{order[1]}" if order else ""
    return f"part {start} of {'x'.join(map(str, shape))}{by}/{key}"


def part_in(name: str) -> PartName | None:
    """Return the tensor that `name` is a part of, with its start and shape; None: it is whole."""
    found = _PART.fullmatch(name)
    if found is None:
        return None
    words = found["shape"]
    shape = tuple(map(int, words.split("x"))) if words else ()
    order = None
    if found["order"]:
        a, b = map(int, found["order"].split("x"))
        order = a, b
    return PartName(found["key"], int(found["start"]), shape, order)


def in_order(value: "Tensor", order: tuple[int, int] | None) -> "Tensor":
    """Return the numbers of a tensor in the order in which its parts count them."""
    if order is None:
        return value.reshape(-1)
    return value.reshape(*order, -1).transpose(0, 1).reshape(-1)


def out_of_order(
    numbers: "Tensor", shape: Sequence[int], order: tuple[int, int] | None
) -> "Tensor":
    """Return the tensor of which `in_order` gives these numbers."""
    if order is None:
        return numbers.view(*shape)
    return numbers.view(order[1], order[0], -1).transpose(0, 1).reshape(*shape)


def key_in(name: str) -> str:
    """Return the key of a tensor, where `name` is that of a part of it, or its own."""
    found = part_in(name)
    return name if found is None else found.key


def word_of(name: str) -> str:
    """Return one word for a tensor or a part of it, by which a sum of its gradients is named."""
    part = part_in(name)
    if part is None or part.order is not None:  # of a slice, each rank has one
        return key_in(name)
    return f"{part.key}@{part.start}"


def slice_path(module: str, number: int, count: int) -> str:
    """Return the path of the ops of a module that read the slice `number` of `count`, from 0."""
    return f"{module}.slice {number + 1} of {count}".lstrip(".")


def slice_in(path: str) -> bool:
    """Return whether a path is that of ops that read one slice of a parameter."""
    return _SLICE.fullmatch(path) is not None
