"""Flat: one tensor that holds many, so that a copy or a sum of all of them is one call."""

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGN_BYTES = 64  # a cache line; every parameter starts on one


@dataclass(frozen=True, slots=True)
class Flat:
    """One tensor that holds many: where each starts, and how many elements there are in all.

    read:   dtype in which a step reads them.
    """

    nodes: tuple[int, ...]
    starts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    device: torch.device
    size: int
    read: torch.dtype

    def new(self) -> Tensor:
        """Return a flat tensor of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, flat: Tensor) -> dict[int, Tensor]:
        """Return for each node its part of `flat`."""
        rows = zip(self.nodes, self.starts, self.shapes, strict=True)
        return {
            node: flat[start : start + count_of(shape)].view(shape) for node, start, shape in rows
        }


def layouts_of(
    parameters: Mapping[int, Tensor], read: Mapping[int, torch.dtype], device: torch.device
) -> list[Flat]:
    """Return one layout for each dtype, kept and read, parameters in node order."""
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for node, value in parameters.items():
        groups.setdefault((value.dtype, read[node]), []).append(node)
    layouts: list[Flat] = []
    for (dtype, read_in), nodes in groups.items():
        starts, size = list[int](), 0
        step = _ALIGN_BYTES // dtype.itemsize
        for node in nodes:
            starts.append(size)
            size += -(-parameters[node].numel() // step) * step
        shapes = tuple(tuple(parameters[node].shape) for node in nodes)
        layouts.append(Flat(tuple(nodes), tuple(starts), shapes, dtype, device, size, read_in))
    return layouts


def all_views(layouts: Sequence[Flat], flats: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return for each node its part of the flat tensor that holds it."""
    pairs = zip(layouts, flats, strict=True)
    return {node: view for layout, flat in pairs for node, view in layout.views(flat).items()}


def run_of(layout: Flat, nodes: AbstractSet[int]) -> slice:
    """Return where nodes that follow each other lie in a flat tensor, with the gap behind them."""
    places = [at for at, node in enumerate(layout.nodes) if node in nodes]
    if not places:
        return slice(0, 0)
    ends = (*layout.starts[1:], layout.size)
    return slice(layout.starts[places[0]], ends[places[-1]])


def count_of(shape: Sequence[int]) -> int:
    """Return how many numbers a tensor of some shape has."""
    return math.prod(shape)
