"""Space: every way to train a transformer on a number of like devices, as arrays.

    tensor x pipe x data = devices    tensor divides the heads, data the batch
    micro-batch                       divides what a replica has of the batch
    interleave                        chunks divide the blocks; micro-batches a multiple of pipe
    recompute, sharding, sequence     all of them; sequence parallel where tensor > 1

Ignores:  expert and context degrees; ranks that stay idle.
Source:   arXiv:2104.04473 (which degrees fit together).
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.estimate.datasheet import Datasheet
from penstock.estimate.runs import Runs
from penstock.estimate.training_run import Recompute, Sharding, even
from penstock.estimate.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Space:
    """What is tried; by default all there is.

    devices:  numbers of them; empty: all that there are.
    """

    recompute: tuple[Recompute, ...] = ("none", "selective", "full")
    sharding: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "full")
    sequence_parallel: tuple[bool, ...] = (False, True)
    most_interleave: int = 1 << 30
    most_pipe: int = 1 << 30
    devices: tuple[int, ...] = ()


Choice = tuple[int, int, int, int, int, Recompute, Sharding, bool]


def candidates(
    model: Transformer, device: Datasheet, devices: int, batch: int, *, space: Space
) -> Iterator[Runs]:
    """Yield the runs of every number of stages: batches of `batch` samples on `devices`."""
    for pipe in divisors(devices):
        if pipe > min(model.blocks, space.most_pipe):
            continue
        found = list(_choices(model, devices, batch, pipe, space=space))
        if found:
            yield runs_of(model, even(model.blocks, pipe), (device,) * pipe, found)


def runs_of(
    model: Transformer,
    stage_blocks: tuple[int, ...],
    devices: tuple[Datasheet, ...],
    choices: Sequence[Choice],
) -> Runs:
    """Return choices as arrays: tensor, data, micro-batch, their number, interleave, ..."""
    numbers = np.array([choice[:5] for choice in choices], np.int64).T
    recompute, sharding, parallel = zip(*(choice[5:] for choice in choices), strict=True)
    return Runs(
        model, stage_blocks, devices, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4],
        np.array(recompute, np.str_), np.array(sharding, np.str_), np.array(parallel, np.bool_),
    )  # fmt: skip


def _choices(
    model: Transformer, devices: int, batch: int, pipe: int, *, space: Space
) -> Iterator[Choice]:
    for tensor in divisors(devices // pipe):
        data = devices // pipe // tensor
        if model.heads % tensor or batch % data:
            continue
        parallel = [False] if tensor == 1 else space.sequence_parallel
        words = list(itertools.product(space.recompute, space.sharding, parallel))
        for micro_batch in divisors(batch // data):
            count = batch // data // micro_batch
            for interleave in chunks(model.blocks, pipe, count, space):
                for recompute, sharding, sequence in words:
                    yield (
                        tensor, data, micro_batch, count, interleave,
                        recompute, sharding, sequence,
                    )  # fmt: skip


def chunks(blocks: int, pipe: int, num_micro_batches: int, space: Space) -> list[int]:
    """Return the numbers of chunks that a rank may have."""
    if pipe == 1 or blocks % pipe or num_micro_batches % pipe:
        return [1]
    return [v for v in divisors(blocks // pipe) if v <= space.most_interleave]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, increasing."""
    return [d for d in range(1, number + 1) if number % d == 0]
