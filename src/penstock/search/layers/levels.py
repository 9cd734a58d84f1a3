"""Levels: stages on hosts of devices, as PipeDream cuts: each level treats the one below as one.

Inside a host, layers are stages on its devices; hosts are the devices of the next level, and a
stage of it is as slow as the best stages inside.  Exact for every level, given the ones below
use all of a host; O(layers^3 * units^2) a level.

Ignores:  memory, and stages that share a host with parts of others.
Source:   arXiv:1806.03377, section 3.2, and its public optimizer.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.search.layers.partition import Chain, Kind, Partition, Stage, costs_of
from penstock.search.layers.partition_kernel import Choices, Floats, fastest_spans


@dataclass(frozen=True, slots=True)
class Level:
    """So many units (devices, or of the level below), and the link between two of them."""

    units: int
    bytes_per_s: float


def partition_levels(chain: Chain, layer_s: Sequence[float], levels: Sequence[Level]) -> Partition:
    """Return the stages whose slowest is fastest; `levels` from the devices of a host outwards.

    A stage's `replicas` are the product over the levels; its seconds are of compute alone.
    Raises:   PlanError: no level, a level without units or with a link that is not above 0.
    """
    if not levels or any(level.units < 1 or not level.bytes_per_s > 0 for level in levels):
        raise PlanError(f"levels are {tuple(levels)}", hint="units and links are above 0")
    before = [0.0, *itertools.accumulate(layer_s)]
    spans = np.subtract.outer(before, before).T.copy()
    made: list[_Made] = []
    for level in levels:
        costs = costs_of(chain, (Kind(level.units, tuple(layer_s)),), level.bytes_per_s)
        shape = (len(chain) + 1, len(chain) + 1, level.units + 1, 2)
        choice = np.zeros(shape, np.int32)
        spans = fastest_spans(spans, costs, level.units, choice)
        made.append(_Made(level.units, choice))
    stages = tuple(_stages(np.array(before), made, 0, len(chain), replicas=1))
    return Partition(stages, float(spans[0, len(chain)]))


class _Made(NamedTuple):
    units: int
    choice: Choices


def _stages(
    before: Floats, made: Sequence[_Made], first: int, end: int, *, replicas: int
) -> Iterator[Stage]:
    """Yield the stages of layers `first` .. `end - 1`, cut by the levels in `made`."""
    if not made:
        yield Stage(first, end, 0, replicas, float(before[end] - before[first]) / replicas)
        return
    *inner, (units, choice) = made
    while first < end:
        cut, copies = map(int, choice[first, end, units])
        yield from _stages(before, inner, first, cut, replicas=replicas * copies)
        first, units = cut, units - copies
