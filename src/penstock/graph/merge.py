"""Merge: consecutive micro-batches joined into one; and a job that begins with a later one.

Larger micro-batches make larger products and fewer calls; smaller ones make a smaller bubble
and less memory.  What is joined here is the data; what the step makes of it is in joined/.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor

from penstock.batches import ReadNumbers, read
from penstock.errors import GraphError
from penstock.graph.batch import TensorKey
from penstock.graph.code import seed_ahead
from penstock.graph.contents import flatten, rebuilt
from penstock.graph.trace import on_device
from penstock.job import Job


def merged(job: Job, count: int) -> Job:
    """Return `job` with `count` consecutive micro-batches joined into one.

    Its loss is the author's, which is of one of them: see `parts_of`.
    Raises:   GraphError: a step's micro-batches cannot be divided so; the call of its data:
              leaves that cannot be joined.
    """
    if count == 1:
        return job
    if job.micro_batches % count:
        raise GraphError(f"{job.micro_batches} micro-batches cannot be joined by {count}")

    data = _Merged(job.data, count)
    return replace(job, data=data, micro_batches=job.micro_batches // count)


def ahead(job: Job, count: int) -> Job:
    """Return a job whose micro-batch k is number k + `count` of `job`, its dropout too.

    count:    may be below 0, for a job of which only later micro-batches are read.
    Its weights begin otherwise: it goes on from a checkpoint.
    """
    if count == 0:
        return job
    return replace(job, data=_Ahead(job.data, count), seed=seed_ahead(job.seed, count))


@final
@dataclass(frozen=True, slots=True)
class _Ahead:
    """Data whose micro-batch k is number k + `count` of another."""

    data: Callable[[int], Iterator[Any]]
    count: int

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        """Return the micro-batches of these numbers, in this order."""
        return read(self.data, reads._replace(first=reads.first + self.count))


@final
@dataclass(frozen=True, slots=True)
class _Merged:
    """Data whose micro-batch k is `count` of another, from number k * count on, joined."""

    data: Callable[[int], Iterator[Any]]
    count: int

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        """Return the micro-batches of these numbers, in this order; the last is a whole one."""
        of = tuple(k for p in reads.places for k in range(p * self.count, (p + 1) * self.count))
        wanted = ReadNumbers(
            reads.first * self.count, of, reads.every * self.count, reads.at * self.count
        )
        source = read(self.data, wanted)
        while True:
            # each copied before the next is read, into whose memory that may be
            parts = [on_device(part) for part in itertools.islice(source, self.count)]
            if len(parts) < self.count:
                return
            yield _join(parts)


def unjoined(job: Job) -> tuple[Job, int]:
    """Return the job with the author's own micro-batches, and how many of them `job` joins."""
    data: Any = job.data
    if isinstance(data, _Ahead) and isinstance(data.data, _Merged):
        whole, count = _Ahead(data.data.data, data.count * data.data.count), data.data.count
    elif isinstance(data, _Merged):
        whole, count = data.data, data.count
    else:
        return job, 1
    return replace(job, data=whole, micro_batches=job.micro_batches * count), count


def parts_of(job: Job, batch: Any) -> list[Any]:
    """Return the author's micro-batches of which a batch of `job` was made: itself, or several."""
    _, count = unjoined(job)
    if count == 1:
        return [batch]
    leaves, spec = flatten(batch)
    return [rebuilt([_part(leaf, k, count) for leaf in leaves], spec) for k in range(count)]


def _part(leaf: Any, number: int, count: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    size = len(leaf) // count
    return leaf[number * size : (number + 1) * size]


def _join(parts: list[Any]) -> Any:
    leaves, specs = zip(*map(flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise GraphError("micro-batches of different structure cannot be joined", hint=_ONE_SHAPE)
    return rebuilt([_joined(row) for row in zip(*leaves, strict=True)], specs[0])


_ONE_SHAPE = "let `data` yield micro-batches of one shape (drop or pad the last one)"


def _joined(leaves: tuple[Any, ...]) -> Any:
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        kinds = {str(TensorKey(tuple(leaf.shape), leaf.dtype, ())) for leaf in leaves}
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            message = f"this batch holds micro-batches of {found}: a step is of one shape"
            raise GraphError(message, hint=_ONE_SHAPE)
        return torch.cat(cast("tuple[Tensor, ...]", leaves))
    if any(isinstance(leaf, Tensor) for leaf in leaves) or any(x != leaves[0] for x in leaves):
        raise GraphError("a batch holds values without a first dimension: it cannot be joined")
    return leaves[0]
