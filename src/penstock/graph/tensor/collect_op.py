"""Collect: the place in a step where a value changes from what each rank has to what all need.

In a graph it is an op, `penstock.collect(value, how, ranks)`; what it reads comes from another
stage, collected on the way (program/instructions.py), so that computing it is nothing.

    sum      each rank has a summand, and gets the sum
    gather   each rank has a slice, and gets those of all, along a new first dim
    scatter  each rank has a summand, and gets of the sum what its place along the first dim is
    exchange each rank has a part for each rank along the first dim, and gets those meant for it,
             with two dims of 1 behind the first: so its shape alone tells what it is
"""

from typing import Any

import torch
from torch import Tensor, fx

from penstock.graph import by_rows
from penstock.graph.functional import custom

TAKE = "take"  # the note of an op that takes a rank's part: how many places of its dim
WHOSE = "whose"  # the note of an op whose last argument is the rank's number

_LIBRARY: Any = by_rows.LIBRARY
_LIBRARY.define("collect(Tensor value, str how, int ranks) -> Tensor")


def _as_seen(value: Tensor, how: str, ranks: int) -> Tensor:
    """Return a tensor as large as what comes of a collect; what this rank alone could make."""
    if how == "gather":
        return value.unsqueeze(0).expand(ranks, *value.shape).contiguous()
    if how == "exchange":
        shape = value.shape
        return value.clone(memory_format=torch.contiguous_format).view(ranks, 1, 1, *shape[1:])
    if how == "scatter":
        return value[0].clone(memory_format=torch.contiguous_format)
    return value.clone(memory_format=torch.contiguous_format)


_LIBRARY.impl("collect", _as_seen, "CompositeExplicitAutograd")
COLLECT: Any = torch.ops.penstock.collect.default


def rank_args(node: fx.Node, rank: int) -> tuple[Any, ...]:
    """Return the arguments of an op on the rank with this number."""
    size = custom(node).get(TAKE)
    if custom(node).get(WHOSE):
        return *node.args[:-1], rank
    if size is None:
        return node.args
    value, dim, *_ = node.args
    return value, dim, rank * size, (rank + 1) * size
