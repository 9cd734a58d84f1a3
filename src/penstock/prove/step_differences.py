"""Step differences: what ranks have kept of a step, beside what the plain loop makes of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints import checkpoint
from penstock.prove.compare import Difference, compared, in_widths, is_narrow
from penstock.prove.plain import Plain

INFINITY = float("inf")
OPTIMIZER = partial(compared, "optimizer")


def found_step(
    folder: Path, step: int, load: Callable[[Path], checkpoint.Checkpoint] = checkpoint.load
) -> checkpoint.Checkpoint:
    """Return what ranks have kept after a step, gradients among it."""
    newest = checkpoint.latest(folder / str(step))
    assert newest is not None, "every rank has written its part"
    return load(newest)


def part_of(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def loss_difference(plain: Plain, what: str, found: Any, expected: Any) -> Difference:
    """Return how losses differ: those of weights of 16 bits are rounded on the way."""
    row = compared(what, {"": _number(found)}, {"": _number(expected)})
    return replace(row, narrow=any(map(is_narrow, plain.parameters.values())))


def _number(value: Any) -> Tensor:
    return torch.tensor([float("nan") if value is None else value], dtype=torch.float64)


def data_differences(
    found: checkpoint.Checkpoint, read: list[tuple[int, str]]
) -> Iterator[Difference]:
    """Yield whether each rank read the micro-batches of the plain loop, by their digests.

    Nothing where ranks have noted none.
    """
    expected, is_told = dict(read), False
    for rank, rows in told_by_rank(found, "read"):
        is_told = True
        for index, digest in rows:
            if expected.get(index) != digest:
                where = f"micro-batch {index} as rank {rank} reads it"
                yield Difference("data", where, INFINITY, bitwise=False)
                return
    if is_told:
        yield Difference("data", "", 0.0, bitwise=True)


def told_by_rank(found: checkpoint.Checkpoint, what: str) -> Iterator[tuple[str, Any]]:
    """Yield (rank, what it tells under "what/RANK")."""
    for key, value in found.plain.items():
        kind, _, rank = key.partition("/")
        if kind == what:
            yield rank, value


def state_differences(plain: Plain, found: checkpoint.Checkpoint) -> Iterator[Difference]:
    """Yield how the optimizers' states differ from that of the one on the whole model."""
    tensors, values = plain.optimizer_state()
    kinds = "optimizer/", "optimizer.", "optimizer-left/"  # the second: of optimizers inside
    held = {k: v for k, v in found.tensors.items() if k.startswith(kinds)}
    if held or tensors:
        yield from in_widths(OPTIMIZER, held, tensors)
    for key, value in values.items():
        if found.plain.get(key) != value:
            yield Difference("optimizer", key, INFINITY, bitwise=False)
