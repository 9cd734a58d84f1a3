"""Bucketed: micro-batches of samples of about one length, padded to the length of their bucket.

The micro-batches of one step come from one bucket, so that all of them have one shape: the key of
the step.  Which step has which key follows from the seed and the epoch, so every rank can tell it
without reading a sample (`key_of`).
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple, final, get_args

from torch.utils.data import default_collate  # pyright: ignore[reportUnknownVariableType]

from penstock.batches.by_number import order_of, picked
from penstock.batches.how import Batching, Collate, own_random, seed_all
from penstock.batches.lengths import Length, Pad, lengths_of, padded
from penstock.batches.reads import ReadNumbers
from penstock.errors import JobError
from penstock.job import Batch

Rest = Literal["drop", "pad", "short"]
Size = int | tuple[int, ...]  # a length, or the sizes of an image


class StepKey(NamedTuple):
    """What the micro-batches of a step have alike: the length to which each of `samples` is padded.

    Steps of one key have one shape.
    """

    length: Size
    samples: int

    def __str__(self) -> str:
        size = self.length if isinstance(self.length, int) else "x".join(map(str, self.length))
        return f"{self.samples} x {size}"


class KeySteps(NamedTuple):
    """The steps of one key in an epoch, from place `first` of a bucket on."""

    key: StepKey
    bucket: int
    first: int
    num_steps: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class Bucketed:
    """Micro-batches of a dataset, by length.

    buckets:  for each length the numbers of its samples.
    parts:    what an epoch is made of, in no order.
    own:      of each sample, its own length.
    """

    dataset: Any = field(repr=False)
    how: Batching
    shuffle: bool
    step_micro_batches: int
    buckets: tuple[tuple[int, ...], ...] = field(repr=False)
    parts: tuple[KeySteps, ...]
    own: tuple[Any, ...] = field(repr=False)
    pad: "Pad | Callable[[Any, Any], Any]"

    def __len__(self) -> int:
        """Return how many micro-batches an epoch has."""
        return self.step_micro_batches * sum(part.num_steps for part in self.parts)

    def __call__(self, start: int) -> Iterator[Batch]:
        return self.picked(ReadNumbers.all_from(start))

    def picked(self, reads: ReadNumbers) -> Iterator[Batch]:
        """Return the micro-batches of these numbers, in this order."""
        return picked(self, reads)

    @property
    def keys(self) -> Mapping[StepKey, int]:
        """Return the keys of the steps of an epoch, and how many steps have each."""
        found: dict[StepKey, int] = {}
        for part in self.parts:
            found[part.key] = found.get(part.key, 0) + part.num_steps
        return found

    def key_of(self, number: int) -> StepKey:
        """Return the key of micro-batch `number`."""
        return self._place(number)[0].key

    def batch(self, number: int) -> Batch:
        """Return micro-batch `number`."""
        with own_random():
            samples: list[Any] = []
            length = self.key_of(number).length
            for place, index in enumerate(self.indices(number)):
                seed_all(self.how.seed, "sample", number, place)
                samples.append(self._padded(self.dataset[index], index, length))
            return self.how.collated(number, samples)

    def _padded(self, sample: Any, index: int, length: Size) -> Any:
        if callable(self.pad):
            return self.pad(sample, length)
        if not isinstance(length, int):
            return sample
        return padded(sample, self.own[index], length, self.pad)

    def indices(self, number: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `number`."""
        part, epoch, at = self._place(number)
        bucket = self.buckets[part.bucket]
        first = part.first + at * part.key.samples
        places = [place % len(bucket) for place in range(first, first + part.key.samples)]
        if not self.shuffle:
            return [bucket[place] for place in places]
        order = _order(len(bucket), self.how.seed, epoch, part.bucket)
        return [bucket[order[place]] for place in places]

    def _place(self, number: int) -> tuple[KeySteps, int, int]:
        """Return the part of a micro-batch, its epoch, and its number in the part."""
        step, micro_batch = divmod(number, self.step_micro_batches)
        epoch, at = divmod(step, len(self) // self.step_micro_batches)
        if self.shuffle:
            at = _order(len(self) // self.step_micro_batches, self.how.seed, epoch, -1)[at]
        for part in self.parts:
            if at < part.num_steps:
                return part, epoch, at * self.step_micro_batches + micro_batch
            at -= part.num_steps
        raise AssertionError("an epoch has as many steps as its parts")


@lru_cache(maxsize=64)
def _order(length: int, seed: int, epoch: int, bucket: int) -> list[int]:
    """Return the order of a bucket in an epoch; -1: that of the steps."""
    return order_of(length, seed, "bucket", epoch, bucket)


def bucketed(  # noqa: PLR0913 - as a DataLoader is told
    dataset: Any,
    lengths: Sequence[Size],
    batch_size: int | Sequence[int],
    *,
    length: Length | Sequence[Any] | None = None,
    pad: "Pad | Callable[[Any, Any], Any]" = 0,
    micro_batches: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    workers: int = 0,
    collate: Collate | None = None,
    last: Rest = "drop",
) -> Bucketed:
    """Return data for a Job: samples of about one length together, padded to one of `lengths`.

    dataset:        anything with a length and indexed samples: sequences, or dicts and tuples of
                    them.
    lengths:        of the buckets; a sample belongs to the shortest that it fits.  Sizes that are
                    no numbers, such as (224, 336), have to be met exactly.
    batch_size:     samples of a micro-batch: a number, or one for each of `lengths`.
    length:         of a sample: a function, or one for each sample; None: that of its first field.
    pad:            behind the end: a number, numbers by field (only these are padded), or a
                    function of a sample and a length.  "labels" and "targets" end in -100.
    micro_batches:  of a step, which all have one length.
    shuffle:        the samples of a bucket and the steps, in each epoch anew.
    last:           samples of a bucket that make no whole step are dropped, filled up with samples
                    from the bucket's start ("pad"), or are a step of smaller micro-batches
                    ("short").

    Raises:         JobError: an invalid argument; a sample is longer than the last bucket; a
                    bucket whose samples would never be seen.
    """
    buckets = _buckets_of(lengths, batch_size)
    _check(last, micro_batches)
    own = lengths_of(dataset, length, seed)
    members: list[list[int]] = [[] for _ in buckets]
    for number, each in enumerate(own):
        members[_bucket_of(each, [key.length for key in buckets], number)].append(number)
    parts: list[KeySteps] = []
    for at, key in enumerate(buckets):
        parts += _parts(key, at, len(members[at]), micro_batches, last)
    most = max(key.samples for key in buckets)
    how = Batching(most, seed, workers, collate or _default, "drop")
    groups = tuple(map(tuple, members))
    return Bucketed(dataset, how, shuffle, micro_batches, groups, tuple(parts), tuple(own), pad)


_default: Any = default_collate  # pyright: ignore[reportUnknownVariableType]


def _check(last: object, micro_batches: object) -> None:
    if last not in get_args(Rest):
        hint = 'the samples of a bucket that are left over: "drop", "pad" or "short"'
        raise JobError(f"last is {last!r}", hint=hint)
    if not isinstance(micro_batches, int) or micro_batches < 1:
        message = f"micro_batches is {micro_batches!r}, not a whole number of 1 or more"
        raise JobError(message, hint="give as many as a step has")


def _buckets_of(lengths: Sequence[Size], batch_size: int | Sequence[int]) -> list[StepKey]:
    """Return the key of the whole steps of each bucket, the shortest first.

    Raises:   JobError: there is none, or they have not one size each.
    """
    sizes = [batch_size] * len(lengths) if isinstance(batch_size, int) else list(batch_size)
    if not lengths or len(sizes) != len(lengths) or len(set(lengths)) != len(lengths):
        message = f"lengths is {lengths!r} and batch_size {batch_size!r}"
        hint = "give lengths that differ, and one batch size, or one for each"
        raise JobError(message, hint=hint)
    if wrong := [size for size in sizes if size < 1]:
        raise JobError(f"batch_size is {wrong[0]}", hint="set it to 1 or more")
    found = [StepKey(length, size) for length, size in zip(lengths, sizes, strict=True)]
    return sorted(found) if all(isinstance(each, int) for each in lengths) else found


def _bucket_of(own: Any, lengths: list[Any], number: int) -> int:
    """Return the bucket of a sample.

    Raises:   JobError: there is none.
    """
    if isinstance(lengths[0], int):
        at = bisect_left(lengths, own)
        if at < len(lengths):
            return at
        hint = f"add a length of {own} or more, or cut the sample in the dataset"
        raise JobError(f"sample {number} is {own} long, the last bucket {lengths[-1]}", hint=hint)
    if tuple(own) in lengths:
        return lengths.index(tuple(own))
    raise JobError(f"sample {number} has the size {own!r}", hint="add it to lengths")


def _parts(key: StepKey, at: int, count: int, micro_batches: int, last: Rest) -> list[KeySteps]:
    """Return the steps of a bucket of `count` samples.

    Raises:   JobError: there are some, and none of them would be seen.
    """
    whole, rest = divmod(count, key.samples * micro_batches)
    if rest and last == "pad":
        whole, rest = whole + 1, 0
    parts = [KeySteps(key, at, 0, whole)] if whole else []
    if (short := rest // micro_batches) and last == "short":
        first = whole * key.samples * micro_batches
        parts.append(KeySteps(key._replace(samples=short), at, first, 1))
    if count and not parts:
        message = f"{count} samples fall into the bucket of {key.length}, a step has"
        hint = 'leave out that length, so that they join the next, or set last="pad"'
        raise JobError(f"{message} {key.samples * micro_batches}: none would be seen", hint=hint)
    return parts
