"""Last short: micro-batches of a dataset, of which an epoch's last has the samples that are left.

It is what a loop over a torch DataLoader trains: a step of each micro-batch, the last one smaller.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

from penstock.batches.by_number import Map, picked
from penstock.batches.how import Batching, own_random, seed_all
from penstock.batches.reads import ReadNumbers
from penstock.job import Batch


class SamplesKey(NamedTuple):
    """What the step of a micro-batch is known by: its number of samples."""

    samples: int

    def __str__(self) -> str:
        return f"{self.samples} samples"


@final
@dataclass(frozen=True, slots=True, eq=False)
class LastShort:
    """Micro-batches of a dataset with indexed samples, each a step of its own.

    whole:  without the samples that are left over at the end of an epoch; there are some.
    """

    step_micro_batches: ClassVar[int] = 1
    whole: Map

    @property
    def dataset(self) -> Any:
        """Return the dataset."""
        return self.whole.dataset

    @property
    def how(self) -> Batching:
        """Return how whole micro-batches are made."""
        return self.whole.how

    @property
    def keys(self) -> Mapping[SamplesKey, int]:
        """Return the keys of the steps of an epoch, and how many steps have each."""
        return {SamplesKey(self.how.batch_size): len(self.whole), self.key_of(len(self) - 1): 1}

    def __len__(self) -> int:
        """Return how many micro-batches an epoch has."""
        return len(self.whole) + 1

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return picked(self, reads)

    def key_of(self, number: int) -> SamplesKey:
        """Return the key of micro-batch `number`."""
        return SamplesKey(len(self._places(number)))

    def batch(self, number: int) -> Batch:
        """Return micro-batch `number`."""
        first = number // len(self) * self.whole.length
        with own_random():
            samples: list[Any] = []
            for place, index in zip(self._places(number), self.indices(number), strict=True):
                seed_all(self.how.seed, "sample", first + place)
                samples.append(self.dataset[index])
            return self.how.collated(number, samples)

    def indices(self, number: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `number`."""
        return self.whole.ordered(number // len(self), self._places(number))

    def _places(self, number: int) -> range:
        """Return the places in its epoch of the samples of a micro-batch."""
        first = number % len(self) * self.how.batch_size
        return range(first, min(first + self.how.batch_size, self.whole.length))
