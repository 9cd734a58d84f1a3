"""By number: micro-batches of a dataset with indexed samples."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import tee
from typing import Any, ClassVar, Protocol, final

import torch
from torch.utils.data import Dataset

from penstock.batches.following import Following, following
from penstock.batches.how import Batching, check_length, mixed, named, own_random, seed_all
from penstock.batches.reads import Endless, ReadNumbers
from penstock.errors import JobError
from penstock.job import Batch


@final
@dataclass(frozen=True, slots=True, eq=False)
class Map:
    """Micro-batches of a dataset with indexed samples."""

    step_micro_batches: ClassVar[int] = 1  # of a step where a job does not say: as a loader has it
    dataset: Any = field(repr=False)
    how: Batching
    shuffle: bool
    length: int = field(init=False)

    def __post_init__(self) -> None:
        try:
            length = len(self.dataset)
        except TypeError as problem:
            hint = "give it a __len__, or make it an IterableDataset"
            raise JobError(f"{named(self.dataset)} has no length", hint=hint) from problem
        object.__setattr__(self, "length", length)
        check_length(self.dataset, length, self.how.batch_size)

    def __len__(self) -> int:
        """Return how many micro-batches an epoch has; of those that wrap, the whole ones."""
        whole, rest = divmod(self.length, self.how.batch_size)
        return whole + (self.how.last == "pad" and rest > 0)

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return picked(self, reads)

    def batch(self, number: int) -> Batch:
        """Return micro-batch `number`."""
        with own_random():
            samples: list[Any] = []
            for at, index in enumerate(self.indices(number), number * self.how.batch_size):
                seed_all(self.how.seed, "sample", at)
                samples.append(self.dataset[index])
            return self.how.collated(number, samples)

    def indices(self, number: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `number`."""
        size, n = self.how.batch_size, self.length
        if self.how.last == "wrap":
            places = [divmod(place, n) for place in range(number * size, (number + 1) * size)]
        else:
            epoch, at = divmod(number, len(self))
            places = [(epoch, place % n) for place in range(at * size, (at + 1) * size)]
        if not self.shuffle:
            return [place for _, place in places]
        return [int(_order(n, self.how.seed, epoch)[place]) for epoch, place in places]

    def ordered(self, epoch: int, places: Iterable[int]) -> list[int]:
        """Return the numbers of the samples at these places of an epoch."""
        if not self.shuffle:
            return list(places)
        order = _order(self.length, self.how.seed, epoch)
        return [int(order[place]) for place in places]


@lru_cache(maxsize=4)
def _order(length: int, seed: int, epoch: int) -> Any:
    source = torch.Generator().manual_seed(mixed(seed, "order", epoch))
    return torch.randperm(length, generator=source).numpy()


def order_of(length: int, *place: object) -> list[int]:
    """Return the numbers below `length` in an order that follows from `place`."""
    source = torch.Generator().manual_seed(mixed(*place))
    order: list[int] = torch.randperm(length, generator=source).numpy().tolist()
    return order


class Numbered(Protocol):
    """Data whose micro-batches are made by their numbers from a dataset with indexed samples.

    A number may be more than one: `indices` tells of what samples its micro-batch is made.
    """

    @property
    def dataset(self) -> Any: ...
    @property
    def how(self) -> Batching: ...
    def batch(self, number: Any) -> Batch: ...
    def indices(self, number: Any) -> list[Any]: ...


class NumberedEpochs(Numbered, Protocol):
    """Such data whose epochs have as many micro-batches each."""

    def __len__(self) -> int: ...


def picked(data: NumberedEpochs, reads: ReadNumbers) -> Iterator[Batch]:
    """Return the micro-batches of these numbers, in this order."""
    return made_of(data, reads.numbers(), len(data))


def made_of(data: Numbered, numbers: Iterator[Any], epoch: int) -> Iterator[Batch]:
    """Return the micro-batches that `data.batch` makes of these, in this order."""
    if not data.how.workers:
        return Endless(_made(data, numbers), epoch)
    return Endless(iter(data.how.loader(_ByNumber(data), numbers)), epoch)


def _made(data: Numbered, numbers: Iterator[Any]) -> Iterator[Batch]:
    ahead = following(data.dataset)
    return map(data.batch, numbers) if ahead is None else _made_ahead(data, numbers, ahead)


def _made_ahead(data: Numbered, numbers: Iterator[Any], ahead: Following) -> Iterator[Batch]:
    """Yield the micro-batches of these; the dataset fetches the samples of those that follow."""
    told, own = tee(_with_problem(numbers))
    coming = (
        index for number, problem in told if problem is None for index in data.indices(number)
    )
    with ahead(coming) as go_on:
        for number, problem in own:
            if problem is not None:
                raise problem
            batch = data.batch(number)
            go_on()
            yield batch


def _with_problem(numbers: Iterator[Any]) -> Iterator[tuple[Any, JobError | None]]:
    """Yield numbers, and last why there are no more: it is raised where its turn comes."""
    try:
        for number in numbers:
            yield number, None
    except JobError as problem:
        yield None, problem


@final
class _ByNumber(Dataset[Batch]):
    """What the processes that read ahead read; to a worker_init_fn it is the dataset itself."""

    of: Numbered

    def __init__(self, of: Numbered) -> None:
        vars(self)["of"] = of  # not an attribute of the dataset

    def __getitem__(self, index: Any) -> Batch:
        return next(_made(self.of, iter((index,))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of.dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.of.dataset, name, value)
