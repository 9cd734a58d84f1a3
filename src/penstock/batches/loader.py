"""Batches: data of a job, from datasets; micro-batch k is the same on every rank.

What is returned may be `Job.data`: a function of a number alone.  Which samples a micro-batch holds
follows from the seed and its number; random numbers that the dataset draws for a sample, from
Python's, numpy's or torch's generator, from the seed and the sample's place in training.  So
ranks may share the work, and a resumed run continues where it was.
"""

import itertools
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,  # pyright: ignore[reportUnknownVariableType]
)

from penstock.batches.as_made import AsMade
from penstock.batches.by_number import Map
from penstock.batches.by_sampler import BySampler
from penstock.batches.by_shape import ByShape
from penstock.batches.how import Batching, Collate, Last, named
from penstock.batches.last_short import LastShort
from penstock.batches.packed import Packed
from penstock.batches.reads import Data
from penstock.batches.stream import Stream
from penstock.errors import JobError
from penstock.job import Batch
from penstock.step_places import PlacedData
from penstock.weighted import WeightedData


def batches(  # noqa: PLR0913 - as a DataLoader is told
    dataset: Any,
    batch_size: int,
    *,
    shuffle: bool = True,
    seed: int = 0,
    workers: int = 0,
    collate: Collate | None = None,
    last: Last = "drop",
) -> Data:
    """Return data for a Job: micro-batches of `batch_size` samples, epoch after epoch.

    dataset:  anything with a length and indexed samples (a torch Dataset, a list, an array), or a
              torch IterableDataset, which comes in its own order: shuffle=False.
    shuffle:  in a new order in each epoch.
    workers:  processes that read ahead in each rank that reads.  An iterable dataset shares
              itself among them, as under torch's DataLoader: micro-batch k is the next one
              of process k % workers.
    collate:  makes a micro-batch from samples; None: torch's default_collate.
    last:     what becomes of the samples left over at the end of an epoch: they are dropped,
              filled up with samples from the epoch's start ("pad"), or with those of the next
              epoch ("wrap"), or are a smaller micro-batch ("short"), whose steps have a plan
              of their own: Job.micro_batches is 1 then.

    Raises:   JobError: an invalid argument; an empty dataset, or fewer samples than one
              micro-batch has; the call of an iterable dataset that is read to its end: the same.
    """
    how = Batching(batch_size, seed, workers, collate or _default, last)
    if _is_map(dataset):
        return _by_number(dataset, how, shuffle=shuffle)
    if last == "short":
        message = f"{named(dataset)} does not say where its last micro-batch is"
        raise JobError(message, hint='set last to "drop", "pad" or "wrap"')
    if shuffle:
        message = f"{named(dataset)} comes in its own order: it cannot be shuffled"
        raise JobError(message, hint="set shuffle=False, and shuffle where it is made")
    return Stream(dataset, how)


def from_loader(
    loader: "DataLoader[Any]", *, seed: int | None = None, last: Last | None = None
) -> Data:
    """Return data for a Job that gives what a torch DataLoader gives, as `batches` does.

    Taken over:  the dataset, batch_size, collate_fn, num_workers, worker_init_fn; whether it
                 shuffles (RandomSampler, SubsetRandomSampler), and the subset or list of numbers
                 that it samples from; drop_last; the seed of its generator, if it has one.
                 Any other sampler or batch sampler: as it is now, with what it keeps.
    Not:         the order in which its own generator would shuffle; pin_memory, timeout,
                 prefetch_factor, persistent_workers, multiprocessing_context.

    seed:        of order and augmentation; None: that of the loader's generator, else 0.
    last:        as of `batches`; None: what a loop over the loader does, "drop" or "short".  Of
                 samples that come in an order of their own no number tells which is the last.

    Raises:   JobError: not a DataLoader; a batch sampler or sampler of which there is no copy to
              begin anew with.  The call of data that is read to a smaller last micro-batch, where
              the samples have an order of their own: nobody says what becomes of it.
    """
    if not _is_loader(loader):
        message = f"from_loader is given the {type(loader).__name__} {str(loader)[:60]}"
        raise JobError(f"{message}, not a torch DataLoader", hint="use ps.batches(dataset, ...)")
    dataset, size, order, drops = _of_loader(loader)
    source: Any = loader
    collate: Any = source.collate_fn
    whole = isinstance(order, AsMade) and source.batch_sampler is order.of
    if size is None and not whole:  # each sample is a micro-batch
        collate = partial(_only, collate)
    given: Any = source.generator
    number = (0 if given is None else given.initial_seed()) if seed is None else seed
    means: Last | None = "drop" if drops else last
    own = collate, last or means, source.worker_init_fn
    how = Batching(size or 1, number, loader.num_workers, *own)
    if isinstance(order, AsMade):
        return BySampler(dataset, how, order, whole)
    if not _is_map(dataset):
        return Stream(dataset, how)
    return _by_number(dataset, how, shuffle=order)


def _by_number(dataset: Any, how: Batching, *, shuffle: bool) -> Map | LastShort:
    """Return micro-batches by their numbers; with a smaller last one where nobody says else."""
    if how.last not in (None, "short"):
        return Map(dataset, how, shuffle)
    whole = Map(dataset, replace(how, last="drop"), shuffle)
    return LastShort(whole) if whole.length % how.batch_size else whole


def epoch_of(data: Data) -> tuple[int, int]:
    """Return the samples of a micro-batch, and how many an epoch has; 0: nobody knows."""
    while isinstance(data, WeightedData | PlacedData | ByShape):
        data = data.of
    if isinstance(data, Map | LastShort | Packed):
        return data.how.batch_size, len(data)
    return (data.how.batch_size, 0) if isinstance(data, Stream) else (0, 0)


# -- what is asked of them -----------------------------------------------------------------------


_default: Any = default_collate  # pyright: ignore[reportUnknownVariableType]


def _is_loader(loader: object) -> bool:
    return isinstance(loader, DataLoader)


def _only(collate: Callable[[Any], Batch], samples: list[Any]) -> Batch:
    return collate(samples[0])


def _is_map(dataset: Any) -> bool:
    """Return whether a dataset gives samples by number.

    Raises:   JobError: it gives them by name.
    """
    if isinstance(dataset, Mapping):
        names = ", ".join(map(repr, itertools.islice(cast("Iterable[str]", dataset), 5)))
        message = f"{named(cast(object, dataset))} gives its samples by name: {names}"
        raise JobError(message, hint="pass one of its parts, or a list of samples")
    return hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


def _of_loader(loader: "DataLoader[Any]") -> tuple[Any, int | None, bool | AsMade, bool]:
    """Return dataset, batch size, whether it shuffles, and whether it drops what is left over.

    Instead of whether it shuffles: the sampler, where that has an order of its own.
    """
    source: Any = loader
    given = source.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, loader.batch_size, False, bool(loader.drop_last)
    if given is None:
        dataset, order = _of_sampler(loader.dataset, source.sampler)
        return dataset, None, order, True
    if type(given) is not BatchSampler:
        return loader.dataset, None, _as_made(given, loader.dataset), True
    dataset, order = _of_sampler(loader.dataset, given.sampler)
    return dataset, given.batch_size, order, bool(given.drop_last)


def _of_sampler(dataset: Any, sampler: Any) -> tuple[Any, bool | AsMade]:
    """Return the dataset that is sampled from, and whether in another order in each epoch.

    Raises:   JobError: it shares the work among ranks.
    """
    if type(sampler) is SequentialSampler:
        return dataset, False
    if type(sampler) is RandomSampler and not sampler.replacement:
        if sampler.num_samples == len(dataset):
            return dataset, True
    elif type(sampler) is SubsetRandomSampler:
        return Subset(dataset, list(sampler.indices)), True
    elif isinstance(sampler, list | tuple | range):
        return Subset(dataset, list(cast("Iterable[int]", sampler))), False
    elif isinstance(sampler, DistributedSampler):
        message = f"the loader's sampler is a {type(cast(object, sampler)).__name__}"
        hint = "leave it out, with shuffle=True: Penstock itself divides the work among ranks"
        raise JobError(f"{message}, which gives each rank other samples", hint=hint)
    return dataset, _as_made(sampler, dataset)


def _as_made(sampler: object, dataset: object) -> AsMade:
    """Return a sampler as it is now.

    Raises:   JobError: it cannot be copied, or be gone through again.
    """
    message = f"the loader's sampler is a {type(sampler).__name__}"
    hint = "use ps.batches(dataset, batch_size), or write data(start) yourself"
    if hasattr(sampler, "__next__"):
        raise JobError(f"{message}, which can be gone through only once", hint=hint)
    try:
        return AsMade(sampler, dataset)
    except (TypeError, AttributeError, pickle.PicklingError) as problem:
        raise JobError(f"{message}, which cannot begin anew: {problem}", hint=hint) from problem
