"""Placing: which member becomes which rank of a plan, so that the least has to be moved."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from scipy.optimize import linear_sum_assignment  # pyright: ignore  - scipy has no types

from penstock.members.words import HeldTensor
from penstock.state.parts import key_in

Sizes = Mapping[str, int]  # bytes, by name of a parameter or buffer


def placed(
    members: Sequence[int],
    wanted: Sequence[Mapping[str, int]],
    holds: Mapping[int, Sequence[HeldTensor]],
) -> tuple[tuple[int, ...], int]:
    """Return the members by rank, and the bytes that have to move in all.

    wanted:  by rank, the bytes of each tensor that it needs, by key.
    holds:   what each member has.
    Of orders that move as little, the one in which members stay as they stand is preferred.
    """
    has = {m: {key_in(held.key) for held in holds.get(m, ())} for m in members}
    lacks = np.array(
        [
            [sum(size for key, size in need.items() if key not in has[m]) for need in wanted]
            for m in members
        ],
        dtype=np.float64,
    )
    apart = np.abs(np.subtract.outer(np.arange(len(members)), np.arange(len(wanted))))
    costs = lacks + apart / (1 + apart.sum())
    _, columns = cast(tuple[Any, Any], linear_sum_assignment(costs))
    ranks: list[int] = columns.tolist()
    moved = sum(float(lacks[row, rank]) for row, rank in enumerate(ranks))
    return tuple(members[ranks.index(rank)] for rank in range(len(wanted))), int(moved)


def sizes_of(holds: Mapping[int, Sequence[HeldTensor]], width: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of every tensor that anybody holds, parts counted as the whole they are of.

    width:  bytes of a number, by dtype.
    """
    found: dict[str, int] = {}
    for rows in holds.values():
        for held in rows:
            shape = held.shape
            key = key_in(held.key)
            if key != held.key:
                words = held.key.split("/", 1)[0].rpartition(" ")[2]
                shape = tuple(map(int, words.split("x"))) if words else ()
            found[key] = math.prod(shape) * width.get(held.dtype, 4)
    return found
