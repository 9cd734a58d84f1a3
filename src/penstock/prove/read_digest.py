"""Read digest: what was read, in a few bytes, so that ranks can be compared with the plain loop."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from penstock.batches.reads import Data, ReadNumbers, read
from penstock.graph.contents import flatten
from penstock.runtime.digest import digest_of as digest_of


class ReadDigests:
    """The micro-batches that each rank of a process reads: (number in the run, digest), in order.

    A rank is a thread of its own.
    """

    def __init__(self) -> None:
        self._rows: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)

    def add(self, number: int, digest: str) -> None:
        """Note what the rank that calls has read."""
        self._rows[threading.get_ident()].append((number, digest))

    def taken(self) -> list[tuple[int, str]]:
        """Return what the rank that calls has read since it asked last."""
        return self._rows.pop(threading.get_ident(), [])


def recorded(data: Data, reads: ReadDigests) -> Data:
    """Return `data` that notes in `reads` what it yields."""
    return _RecordedData(data, reads)


@final
@dataclass(frozen=True, slots=True)
class _RecordedData:
    data: Data
    noted: ReadDigests

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Any]:
        for number, batch in zip(reads.numbers(), read(self.data, reads), strict=False):
            self.noted.add(number, digest_of(flatten(batch)[0]))
            yield batch
