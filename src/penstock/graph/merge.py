"""Merge: consecutive micro-batches joined into one, or each divided into parts; and a job that
begins with a later one.

Larger micro-batches make larger products and fewer calls; smaller ones make a smaller bubble
and less memory, and there are enough of them for all replicas.  What is joined or divided here is
the data; what the step makes of it is in joined/.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, cast, final

import torch
from torch import Tensor

from penstock.batches.reads import ReadNumbers, read
from penstock.errors import BatchMisfitError, GraphError
from penstock.graph.batch import PLAIN, Division, TensorKey
from penstock.graph.code import seed_ahead
from penstock.graph.contents import flatten, rebuilt
from penstock.graph.trace import on_device
from penstock.graph.unread import UnlikeValues, any_key
from penstock.job import Job
from penstock.taken import Taken


def merged(job: Job, count: Taken, division: Division | None = None) -> Job:
    """Return `job` with `count` consecutive micro-batches joined into one, or divided into parts.

    Its loss is the author's, which is of one of them: see `parts_of`.
    count:     1 / n: each becomes n, as `division` says.
    Raises:    GraphError: a step's micro-batches cannot be divided so.  The call of its data:
               BatchMisfitError: leaves that cannot be joined.
    """
    if count == 1:
        return job
    if count < 1:
        assert division is not None, "who divides knows how"
        data = _Divided(job.data, division)
        return replace(job, data=data, micro_batches=job.micro_batches * division.parts)
    if job.micro_batches % count:
        raise GraphError(f"{job.micro_batches} micro-batches cannot be joined by {count}")

    whole = int(count)
    return replace(job, data=_Merged(job.data, whole), micro_batches=job.micro_batches // whole)


def ahead(job: Job, count: int) -> Job:
    """Return a job whose micro-batch k is number k + `count` of `job`, its dropout too.

    count:    may be below 0, for a job of which only later micro-batches are read.
    Its weights begin otherwise: it goes on from a checkpoint.
    """
    if count == 0:
        return job
    if isinstance(job.data, _Divided):
        division = job.data.division
        whole, rest = divmod(count, division.parts)
        assert not rest, "a step begins with a micro-batch of the author's"
        data = _Divided(_Ahead(job.data.data, whole), division)
        return replace(job, data=data, seed=seed_ahead(job.seed, whole))
    return replace(job, data=_Ahead(job.data, count), seed=seed_ahead(job.seed, count))


@final
@dataclass(frozen=True, slots=True)
class _Ahead:
    """Data whose micro-batch k is number k + `count` of other data."""

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


@final
@dataclass(frozen=True, slots=True)
class _Divided:
    """Data in n parts: micro-batch k is part k % n of micro-batch k // n of other data."""

    data: Callable[[int], Iterator[Any]]
    division: Division

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        """Return the micro-batches of these numbers; a whole one is read once for its parts."""
        parts, key = self.division.parts, self.division.key
        source, held, leaves = read(self.data, _of_wholes(reads, parts)), -1, list[Any]()
        for number in reads.numbers():
            whole, part = divmod(number, parts)
            if whole != held:
                batch = next(source, None)
                if batch is None:
                    return
                held, leaves = whole, key.leaves_of(batch)
            yield self.division.part_of(leaves, part)


def _of_wholes(reads: ReadNumbers, parts: int) -> ReadNumbers:
    """Return the numbers of the micro-batches of which parts are read, in the same order."""
    rounds = parts // math.gcd(reads.every, parts)  # until one ends with a whole one
    first, rest = divmod(reads.first, parts)
    places: list[int] = []
    at = 0
    for number, (turn, place) in enumerate(itertools.product(range(rounds), reads.places)):
        whole = (rest + turn * reads.every + place) // parts
        if not places or places[-1] != whole:
            places.append(whole)
        if number == reads.at:
            at = len(places) - 1
    return ReadNumbers(first, tuple(places), reads.every * rounds // parts, at)


def number_of(job: Job, index: int) -> int:
    """Return the number of the author's micro-batch that is number `index` of `job`, or has it.

    That of the first, where several are joined.
    """
    _, count = unjoined(job)
    return math.floor(index * count)


def unjoined(job: Job) -> tuple[Job, Taken]:
    """Return the job with the author's own micro-batches, and how many of them `job` joins."""
    data: Any = job.data
    if isinstance(data, _Divided):
        parts = data.division.parts
        author = replace(job, data=data.data, micro_batches=job.micro_batches // parts)
        return author, Fraction(1, parts)
    if isinstance(data, _Ahead) and isinstance(data.data, _Merged):
        whole, count = _Ahead(data.data.data, data.count * data.data.count), data.data.count
    elif isinstance(data, _Merged):
        whole, count = data.data, data.count
    else:
        return job, 1
    return replace(job, data=whole, micro_batches=job.micro_batches * count), count


def over(job: Job, data: Callable[[int], Iterator[Any]]) -> Job:
    """Return a job whose micro-batches are made of those of other data, joined or divided alike."""
    own: Any = job.data
    is_made = isinstance(own, _Divided | _Merged)
    return replace(job, data=replace(own, data=data) if is_made else data)


def parts_of(job: Job, batch: Any) -> list[Any]:
    """Return the author's micro-batches of which a batch of `job` was made: itself, or several."""
    _, count = unjoined(job)
    if count == 1:
        return [batch]
    assert count > 1, "a part is not the author's"
    leaves, spec = flatten(batch)
    whole = int(count)
    return [rebuilt([_part(leaf, k, whole) for leaf in leaves], spec) for k in range(whole)]


def _part(leaf: Any, number: int, count: int) -> Any:
    if isinstance(leaf, UnlikeValues):
        return leaf.values[number]
    if not isinstance(leaf, Tensor):
        return leaf
    size = len(leaf) // count
    return leaf[number * size : (number + 1) * size]


def _join(parts: list[Any]) -> Any:
    leaves, specs = zip(*map(flatten, parts), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise BatchMisfitError(
            "micro-batches of different structure cannot be joined", hint=_ONE_SHAPE
        )
    return rebuilt([_joined(row) for row in zip(*leaves, strict=True)], specs[0])


_ONE_SHAPE = "let `data` yield micro-batches of one shape (drop_last=True, or pad the last one)"


def _joined(leaves: tuple[Any, ...]) -> Any:
    if all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        kinds = {str(TensorKey(tuple(leaf.shape), leaf.dtype, ())) for leaf in leaves}
        if len(kinds) > 1:
            found = " and ".join(sorted(kinds))
            message = f"this batch holds micro-batches of {found}: a step is of one shape"
            raise BatchMisfitError(message, hint=_ONE_SHAPE)
        return torch.cat(cast("tuple[Tensor, ...]", leaves))
    if all(any_key(leaf) is not None for leaf in leaves):
        is_one = all(isinstance(leaf, PLAIN) and leaf == leaves[0] for leaf in leaves)
        return leaves[0] if is_one else UnlikeValues(leaves)  # fits where it is not read
    if any(isinstance(leaf, Tensor) for leaf in leaves) or any(x != leaves[0] for x in leaves):
        raise BatchMisfitError(
            "a batch holds values without a first dimension: it cannot be joined"
        )
    return leaves[0]
