"""Reads: which micro-batches a reader takes, by number, and reading them."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import JobError
from penstock.job import Batch

Data = Callable[[int], Iterator[Batch]]
_MOST_BEGUN = 2  # iterators at a time: a rank may read in two places in turn, as under chimera
_END = object()


class ReadNumbers(NamedTuple):
    """The numbers of the micro-batches that a reader takes, without end.

    first + p for p in places, then first + every + p for p in places, and so on; of the first
    round those from places[at] on.
    """

    first: int
    places: Sequence[int]
    every: int
    at: int = 0

    @classmethod
    def all_from(cls, start: int) -> "ReadNumbers":
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


class Endless:
    """Micro-batches that go on without end, epoch after epoch.

    epoch:  how many an epoch has; 0: nobody knows.
    """

    __slots__ = ("_next", "epoch")

    def __init__(self, source: Iterator[Batch], epoch: int) -> None:
        self._next, self.epoch = source.__next__, epoch

    def __iter__(self) -> "Endless":
        return self

    def __next__(self) -> Batch:
        return self._next()


def read(data: Data, reads: ReadNumbers) -> Iterator[Batch]:
    """Return the micro-batches of a job's data of these numbers, in this order.

    Data that has a method `picked` is asked once for all of them.  Else `data(number)` is called
    where a number does not follow one before; or what lies between is read and dropped, if that
    takes less time than the last such call did.
    """
    picked: Callable[[ReadNumbers], Iterator[Batch]] | None = getattr(data, "picked", None)
    return in_turn(data, reads, time.perf_counter) if picked is None else picked(reads)


@dataclass(slots=True)
class _OpenIterator:
    """An iterator over the data, and the number of the micro-batch that it gives next."""

    source: Iterator[Batch]
    number: int


def in_turn(data: Data, reads: ReadNumbers, clock: Callable[[], float]) -> Iterator[Batch]:
    """Yield the micro-batches of these numbers by as few calls of `data` as pay."""
    begun: list[_OpenIterator] = []
    start_s = read_s = 0.0  # the last call with its first micro-batch; one of the others
    for number in reads.numbers():
        start = clock()
        before = [each for each in begun if each.number <= number]
        near = max(before, key=lambda each: each.number, default=None)
        between = 0 if near is None else number - near.number
        if near is None or (between and (between + 1) * read_s > start_s):
            begun = sorted(
                (each for each in begun if each is not near), key=lambda each: each.number
            )
            near, between = _OpenIterator(started(data, number), number), -1
            begun = [*begun[1 - _MOST_BEGUN :], near]
        found = next(itertools.islice(near.source, max(between, 0), None), _END)
        if found is _END:
            return
        near.number = number + 1
        if between < 0:
            start_s = clock() - start
        else:
            read_s = (clock() - start) / (between + 1)
        yield found


def started(data: Data, start: int) -> Iterator[Batch]:
    """Return the iterator over micro-batches from `start` on.

    Raises:   JobError: `data(start)` is not iterable.
    """
    found: Any = data(start)
    try:
        return iter(found)
    except TypeError as problem:
        message = f"data({start}) of the job is the {type(found).__name__} {str(found)[:60]}"
        hint = "let `data` yield micro-batches: def data(start): ... yield batch"
        raise JobError(f"{message}, not an iterator", hint=hint) from problem
