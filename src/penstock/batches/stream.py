"""Stream: micro-batches of a dataset that can only be read from its beginning."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, final

from torch.utils.data import IterableDataset, get_worker_info

from penstock.batches.how import Batching, check_length, named, own_random, same, seed_all
from penstock.batches.reads import Endless, ReadNumbers
from penstock.errors import JobError
from penstock.job import Batch


@final
@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """Micro-batches of a dataset that can only be iterated, again in every epoch."""

    step_micro_batches: ClassVar[int] = 1  # of a step where a job does not say: as a loader has it
    dataset: Any = field(repr=False)
    how: Batching

    def __post_init__(self) -> None:
        name, again = named(self.dataset), getattr(self.dataset, "__iter__", None)
        if again is None:
            hint = "pass what has __len__ and __getitem__, or __iter__"
            raise JobError(f"{name} is not a dataset", hint=hint)
        if hasattr(self.dataset, "__next__"):
            hint = "pass what can be iterated again: an IterableDataset, a list"
            raise JobError(f"{name} can be iterated only once", hint=hint)

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order; others are read and dropped."""
        return Endless(self._picked(reads), 0)

    def _picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        places, first = list(reads.places), reads.first
        wanted = [first + place for place in places[reads.at :]]
        upcoming = min(wanted)
        source = self._from(upcoming)
        while True:
            held: dict[int, Callable[[], Batch]] = {}
            for number in wanted:
                while upcoming <= number:
                    batch = next(source)
                    if upcoming in wanted:
                        held[upcoming] = batch
                    upcoming += 1
                yield held.pop(number)()
            first += reads.every
            wanted = [first + place for place in places]

    def _from(self, number: int) -> Iterator[Callable[[], Batch]]:
        """Yield what makes the micro-batches from `number` on, for the first that is wanted."""
        workers = self.how.workers
        if not workers:
            for at, samples in enumerate(itertools.islice(self.groups(), number, None), number):
                yield partial(self.collated, at, samples)
        begin = number - number % workers  # of which process 0 has the first
        loader = self.how.loader(_Shard(self, begin // workers))
        for at, batch in enumerate(loader, begin):
            if at >= number:
                yield partial(same, batch)

    def collated(self, number: int, samples: list[Any]) -> Batch:
        """Return micro-batch `number`, made of `samples`."""
        with own_random():
            return self.how.collated(number, samples)

    def groups(self) -> Iterator[list[Any]]:
        """Yield the samples of one micro-batch after another, epoch after epoch."""
        size, rest = self.how.batch_size, list[Any]()
        for epoch in itertools.count():
            first, count = list[Any](), -len(rest)
            for group in self._epoch(epoch, rest):
                count += len(group)
                rest = group if len(group) < size else []
                if not rest and group:
                    first = first or list(group)
                    yield group
            check_length(self.dataset, count, size)
            rest = yield from self.how.left_over(rest, first, named(self.dataset))

    def _epoch(self, epoch: int, group: list[Any]) -> Iterator[list[Any]]:
        """Yield an epoch by micro-batches, `group` begins the first; the last is not whole."""
        info = get_worker_info()
        place = self.how.seed, 0 if info is None else info.id, epoch
        with own_random():
            seed_all(*place, "begin")
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            source, numbers = iter(self.dataset), itertools.count()
        end, ended = object(), False
        while not ended:
            with own_random():
                while len(group) < self.how.batch_size and not ended:
                    seed_all(*place, next(numbers))
                    sample = next(source, end)
                    ended = sample is end
                    group += [] if ended else [sample]
            yield group
            group = []


@final
class _Shard(IterableDataset[Any]):
    """What one process reads of a stream: from its micro-batch number `skip` on.

    To a worker_init_fn it is the dataset itself.
    """

    stream: Stream
    skip: int

    def __init__(self, stream: Stream, skip: int) -> None:
        vars(self).update(stream=stream, skip=skip)  # not attributes of the dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.stream.dataset, name, value)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        assert info is not None, "is read by a process of its own"
        own = itertools.islice(self.stream.groups(), self.skip, None)
        for at, samples in enumerate(own, self.skip):
            yield self.stream.collated(at * info.num_workers + info.id, samples)
