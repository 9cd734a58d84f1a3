"""Reads: the numbers of the micro-batches that somebody reads, and reading them."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from penstock.errors import JobError
from penstock.job import Batch

Data = Callable[[int], Iterator[Batch]]


class Reads(NamedTuple):
    """The numbers of the micro-batches that somebody reads, without end.

    first + p for p in places, then first + every + p for p in places, and so on; of the first
    round those from places[at] on.
    """

    first: int
    places: Sequence[int]
    every: int
    at: int = 0

    @classmethod
    def all_from(cls, start: int) -> "Reads":
        """Return the reads of start, start + 1, start + 2, ..."""
        return cls(start, (0,), 1)

    def next_number(self) -> int:
        """Return the first of the numbers."""
        return self.first + self.places[self.at]

    def numbers(self) -> Iterator[int]:
        """Yield the numbers in order."""
        for place in self.places[self.at :]:
            yield self.first + place
        for first in itertools.count(self.first + self.every, self.every):
            for place in self.places:
                yield first + place


def read(data: Data, reads: Reads) -> Iterator[Batch]:
    """Return the micro-batches of a job's data of these numbers, in this order.

    Data that has a method `picked` is asked once for all of them; else `data(number)` is called
    wherever a number does not follow the one before.
    """
    picked: Callable[[Reads], Iterator[Batch]] | None = getattr(data, "picked", None)
    return _in_turn(data, reads) if picked is None else picked(reads)


def _in_turn(data: Data, reads: Reads) -> Iterator[Batch]:
    source, follows = iter(()), -1
    for number in reads.numbers():
        if number != follows:
            source = started(data, number)
        follows = number + 1
        try:
            batch = next(source)
        except StopIteration:
            return
        yield batch


def started(data: Data, start: int) -> Iterator[Batch]:
    """Return the iterator over micro-batches from `start` on.

    Raises:   JobError: `data(start)` is nothing to iterate over.
    """
    found: Any = data(start)
    try:
        return iter(found)
    except TypeError as problem:
        message = f"data({start}) of the job is the {type(found).__name__} {str(found)[:60]}"
        hint = "let `data` yield micro-batches: def data(start): ... yield batch"
        raise JobError(f"{message}, not an iterator", hint=hint) from problem
