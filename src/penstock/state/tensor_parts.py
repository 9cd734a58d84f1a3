"""Parts: tensors of which ranks, or the slices of a step, have parts; taken apart and together."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.graph.graph import Graph
from penstock.graph.parts import PartName, in_order, out_of_order, part_in
from penstock.graph.parts import key_in as key_in
from penstock.graph.parts import part_key as part_key


def sliced(tensors: Mapping[str, Tensor], graph: Graph) -> dict[str, Tensor]:
    """Return tensors by the names of the graph's parameters: of those that it has in slices each.

    A slice is in the memory of the whole, if that lies in one piece.
    """
    found = dict(tensors)
    for node in graph.nodes:
        part = part_in(node.name) if node.kind == "parameter" else None
        if part is not None and (value := tensors.get(part.key)) is not None:
            numbers = in_order(value, part.order)
            rows = numbers[part.start : part.start + math.prod(node.shape)]
            found[node.name] = rows.view(node.shape)
            found.pop(part.key, None)
    return found


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by key, those of which there are parts put together.

    Raises:   CheckpointError: a part is missing.
    """
    found: dict[str, Tensor] = {}
    parts: defaultdict[PartName, dict[int, Tensor]] = defaultdict(dict)
    for key, value in tensors.items():
        if (part := part_in(key)) is not None:
            parts[part._replace(start=0)][part.start] = value
        else:
            found[key] = value
    for (key, _, shape, order), row in parts.items():
        found[key] = out_of_order(_joined(key, shape, row), shape, order)
    return found


def _joined(key: str, shape: Sequence[int], row: Mapping[int, Tensor]) -> Tensor:
    """Return the numbers of a tensor, of its parts by where they start.

    Two stages that share a parameter divide it each in its own way: its parts overlap, and have
    the same numbers.  Where one of them ends the same stage has another, or that starts there too.
    """
    ordered, end, size = list[Tensor](), 0, math.prod(shape)
    while end < size and (part := row.get(end)) is not None and part.numel():
        ordered.append(part.reshape(-1))
        end += part.numel()
    if end != size:
        message = f"the checkpoint holds {end} numbers of {key}, which has {[*shape]}"
        raise CheckpointError(message, hint="a part of it is missing: use an older one")
    return torch.cat(ordered or [part.reshape(-1) for part in row.values()])
