"""By sampler: micro-batches of the samples that a loader's own sampler names, in its own order.

A sampler cannot be asked for its samples from a number on.  It is gone through again from its
beginning, as it was when the loader was handed over, epoch after epoch: numbers alone, of which a
million take a second; only samples that are asked for are read.
"""

import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from penstock.batches.as_made import AsMade
from penstock.batches.by_number import made_of
from penstock.batches.how import Batching, named, own_random, seed_all
from penstock.batches.reads import ReadNumbers
from penstock.errors import JobError
from penstock.job import Batch


@final
@dataclass(frozen=True, slots=True, eq=False)
class BySampler:
    """Micro-batches of a dataset with indexed samples, which a sampler names.

    sampler:  its numbers, one by one; or micro-batches of them, where it is `whole`.
    """

    step_micro_batches: ClassVar[int] = 1  # of a step where a job does not say: as a loader has it
    dataset: Any = field(repr=False)
    how: Batching
    sampler: AsMade
    whole: bool

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return made_of(self, self._named(reads), 0)

    def batch(self, number: tuple[int, list[Any]]) -> Batch:
        """Return the micro-batch of a number, made of these samples."""
        at_number, indices = number
        with own_random():
            samples: list[Any] = []
            for at, index in enumerate(indices):
                seed_all(self.how.seed, "sample", at_number, at)
                samples.append(self.dataset[index])
            return self.how.collated(at_number, samples)

    def indices(self, number: tuple[int, list[Any]]) -> list[Any]:
        """Return the numbers of the samples of a micro-batch."""
        return number[1]

    def _named(self, reads: ReadNumbers) -> Iterator[tuple[int, list[Any]]]:
        """Yield the numbers of these micro-batches, and what each is made of."""
        places, source = set(reads.places), enumerate(self.groups())
        ahead: dict[int, list[Any]] = {}
        for number in reads.numbers():
            while number not in ahead:
                at, group = next(source)
                if at >= reads.first and (at - reads.first) % reads.every in places:
                    ahead[at] = group
            yield number, ahead.pop(number)

    def groups(self) -> Iterator[list[Any]]:
        """Yield the numbers of the samples of one micro-batch after another.

        Raises:   JobError: an epoch has none; it ends with a smaller one, and `how` says nothing
                  of those; what names them was changed since.
        """
        rest, sampler = list[Any](), self.sampler.again()
        for epoch in itertools.count():
            self._check()
            drawn = self._drawn(sampler, epoch)
            if self.whole:
                count = 0
                for group in drawn:
                    count += 1
                    yield list(group)
                self._check_count(count, 1)
            else:
                rest = yield from self._epoch(drawn, rest)

    def _epoch(
        self, drawn: Iterator[Any], rest: list[Any]
    ) -> Generator[list[Any], None, list[Any]]:
        """Yield an epoch by micro-batches, `rest` begins the first; return what is left over."""
        size, first, count = self.how.batch_size, list[Any](), 0
        for index in drawn:
            count += 1
            rest.append(index)
            if len(rest) == size:
                first = first or rest
                yield rest
                rest = []
        self._check_count(count, size)
        return (yield from self.how.left_over(rest, first, "the loader's sampler"))

    def _drawn(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """Yield what a sampler names in an epoch; what it draws follows from seed and place."""
        place, end = (self.how.seed, "sampler", epoch), object()
        with own_random():
            seed_all(*place, "begin")
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            source = iter(sampler)
        for number in itertools.count():
            with own_random():
                seed_all(*place, number)
                index = next(source, end)
            if index is end:
                return
            yield index

    def _check_count(self, count: int, least: int) -> None:
        if count < least:
            message = f"the loader's {named_sampler(self.sampler.of)} ends an epoch after {count}"
            raise JobError(f"{message}; a micro-batch has {least}", hint="check what it samples")

    def _check(self) -> None:
        if self.sampler.has_changed():
            message = f"the loader's {named_sampler(self.sampler.of)} was changed during training"
            hint = "what names samples by what was trained belongs into data: def data(start): ..."
            raise JobError(
                f"{message}, and {named(self.dataset)} is read by its first state", hint=hint
            )


def named_sampler(sampler: object) -> str:
    return f"sampler ({type(sampler).__name__})"
