"""Parts: tensors of which ranks, or the slices of a step, have parts; taken apart and together."""

import math
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate

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
        ordered = [row[start].reshape(-1) for start in sorted(row)]
        ends = list(accumulate(len(part) for part in ordered))
        if sorted(row) != [0, *ends[:-1]] or ends[-1] != math.prod(shape):
            message = f"the checkpoint holds {ends[-1]} numbers of {key}, which has {list(shape)}"
            raise CheckpointError(message, hint="a part of it is missing: use an older one")
        found[key] = out_of_order(torch.cat(ordered), shape, order)
    return found
