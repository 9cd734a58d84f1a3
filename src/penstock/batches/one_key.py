"""Of key: the micro-batches of one key of keyed data, as data of its own.

With it a job has one shape: it is examined, traced, measured and proved as any other.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import final

from penstock.batches.by_shape import ByShape
from penstock.batches.reads import Data, ReadNumbers, started
from penstock.job import Batch, Job
from penstock.keyed import Keyed, keyed
from penstock.weighted import WeightedData


@final
@dataclass(frozen=True, slots=True)
class OfKey:
    """Micro-batches of the steps of one key, step after step, epoch after epoch.

    per_step:  micro-batches of a step of the job.
    """

    data: Data
    only_key: Hashable
    per_step: int

    def __call__(self, start: int) -> Iterator[Batch]:
        """Return the micro-batches from number `start` on, as they are numbered here."""
        return self._read(islice(self._numbers(), start, None))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        known, source = list[int](), self._numbers()

        def numbers() -> Iterator[int]:
            for wanted in reads.numbers():
                known.extend(islice(source, max(0, wanted + 1 - len(known))))
                yield known[wanted]

        return self._read(numbers())

    def _numbers(self) -> Iterator[int]:
        """Yield the numbers in the whole data of the micro-batches of the key."""
        whole = keyed(self.data)
        assert whole is not None, "only keyed data has keys"
        for step in count():
            first = step * self.per_step
            if whole.key_of(first) == self.only_key:
                yield from range(first, first + self.per_step)

    def _read(self, numbers: Iterator[int]) -> Iterator[Batch]:
        for number in numbers:
            yield next(started(self.data, number))


def job_of_key(job: Job, key: Hashable) -> Job:
    """Return a job of the steps of one key."""
    own = job.data
    if isinstance(own, WeightedData):
        part = OfKey(own.of, key, job.micro_batches)
        return replace(job, data=WeightedData(part, own.weight, own.per_step))
    return replace(job, data=OfKey(own, key, job.micro_batches))


def keys_of(job: Job) -> dict[Hashable, int]:
    """Return the keys of a job's steps and how many steps of an epoch have each; empty: unknown.

    The one that most steps have is the first.
    """
    known: Keyed | None = keyed(job.data)
    if known is None:
        return {}
    rows = sorted(known.keys.items(), key=lambda row: -row[1])
    return dict(rows)


def is_by_shape(job: Job) -> bool:
    """Return whether the shapes of a job's data are those of one run, which a longer one may not
    have alike.
    """
    own = job.data.of if isinstance(job.data, WeightedData) else job.data
    data = own.data if isinstance(own, OfKey) else own
    return isinstance(data, ByShape)
