"""Read on: data that several readers of one rank read in turn, each where the one before ended.

Steps of several shapes may be divided into unlike numbers of parts, and so are read by readers of
their own.  What they read are micro-batches of one stream: it is begun once, as are the processes
that read ahead for it.
"""

from collections.abc import Iterator
from typing import Any, final

from penstock.batches.reads import Data, ReadNumbers, read
from penstock.job import Batch

_END = object()


@final
class ReadOn:
    """Micro-batches of other data, whose iterator is kept for who reads the next number."""

    def __init__(self, of: Data) -> None:
        self.of = of
        self._batches: Iterator[Batch] = iter(())
        self._numbers: Iterator[int] = iter(())

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Yield the micro-batches of these numbers, in this order."""
        while (found := self._read(reads)) is not _END:
            yield found
            turns, at = divmod(reads.at + 1, len(reads.places))
            reads = reads._replace(first=reads.first + turns * reads.every, at=at)

    def _read(self, reads: ReadNumbers) -> Any:
        """Return the first micro-batch of these; begun anew where another was to come.

        So is what failed, if it is asked for once more.
        """
        if next(self._numbers, None) != reads.next_number():
            self._batches, self._numbers = read(self.of, reads), reads.numbers()
            next(self._numbers)
        return next(self._batches, _END)
