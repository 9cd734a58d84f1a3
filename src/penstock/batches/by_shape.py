"""By shape: micro-batches of other data of which somebody has looked at each, so that its shape is
known before it is read.

A loader that pads each batch to its longest makes such data.  What was looked at are those of a
run: no number from there on is asked for, but to examine a shape of which there are few.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

from penstock.batches.reads import Data, ReadNumbers, read, started
from penstock.job import Batch


@final
@dataclass(frozen=True, slots=True, eq=False)
class ByShape:
    """The first micro-batches of other data, each a step of its own, over and over.

    shapes:  of each of them, in words.
    """

    step_micro_batches: ClassVar[int] = 1
    of: Data
    shapes: tuple[str, ...] = field(repr=False)

    @property
    def keys(self) -> Mapping[str, int]:
        """Return the shapes, and how many steps have each."""
        return Counter(self.shapes)

    def key_of(self, number: int) -> str:
        """Return the shape of micro-batch `number`."""
        return self.shapes[number % len(self.shapes)]

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Yield the micro-batches of these numbers, in this order."""
        source = read(self.of, reads)
        for number in reads.numbers():
            if number < len(self.shapes):
                yield next(source)
            else:
                yield next(started(self.of, number % len(self.shapes)))
