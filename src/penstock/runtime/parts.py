"""Parts: how a checkpoint names tensors of which each rank saves the part that it keeps."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from penstock.errors import CheckpointError

_PART = re.compile(r"part (?P<start>\d+) of (?P<shape>[\dx]*)/(?P<key>.+)", re.DOTALL)


def part_key(key: str, start: int, shape: Sequence[int]) -> str:
    """Return the name of what lies from number `start` on of the tensor `key`."""
    return f"part {start} of {'x'.join(map(str, shape))}/{key}"


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by key, those of which there are parts put together.

    Raises:   CheckpointError: a part is missing.
    """
    found: dict[str, Tensor] = {}
    parts: defaultdict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        if is_part := _PART.fullmatch(key):
            parts[is_part["key"], is_part["shape"]][int(is_part["start"])] = value
        else:
            found[key] = value
    for (key, words), row in parts.items():
        shape = tuple(map(int, words.split("x"))) if words else ()
        ordered = [row[start] for start in sorted(row)]
        ends = list(accumulate(len(part) for part in ordered))
        if sorted(row) != [0, *ends[:-1]] or ends[-1] != math.prod(shape):
            message = f"the checkpoint holds {ends[-1]} numbers of {key}, which has {list(shape)}"
            raise CheckpointError(message, hint="a part of it is missing: use an older one")
        found[key] = torch.cat(ordered).view(shape)
    return found


def key_in(name: str) -> str:
    """Return the key of a tensor, where `name` is that of a part of it, or its own."""
    found = _PART.fullmatch(name)
    return name if found is None else found["key"]
