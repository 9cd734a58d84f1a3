"""Digest: what was read, told in few bytes, so that ranks can be compared with the plain loop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

from penstock.batches import Data, read
from penstock.batches import Reads as Numbers
from penstock.graph.contents import flatten
from penstock.runtime.digest import digest_of as digest_of


class Reads:
    """The micro-batches that a process has read: (number in the run, digest), in order."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str]] = []

    def taken(self) -> list[tuple[int, str]]:
        """Return what was read since this was asked last."""
        taken, self.rows = self.rows, []
        return taken


def recorded(data: Data, reads: Reads) -> Data:
    """Return `data` that notes in `reads` what it yields."""
    return _Recorded(data, reads)


@final
@dataclass(frozen=True, slots=True)
class _Recorded:
    data: Data
    noted: Reads

    def __call__(self, start: int) -> Iterator[Any]:
        return self.picked(Numbers.all_from(start))

    def picked(self, reads: Numbers) -> Iterator[Any]:
        for number, batch in zip(reads.numbers(), read(self.data, reads), strict=False):
            self.noted.rows.append((number, digest_of(flatten(batch)[0])))
            yield batch
