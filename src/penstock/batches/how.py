"""How: how micro-batches are made from samples, and with which random numbers."""

import hashlib
import random
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast, final, get_args

import numpy as np
import torch
from torch.utils.data import DataLoader

from penstock import _compat
from penstock.errors import JobError
from penstock.job import Batch

Last = Literal["drop", "pad", "wrap", "short"]
Collate = Callable[[list[Any]], Batch]


@final
@dataclass(frozen=True, slots=True)
class Batching:
    """How micro-batches are made; last None: an epoch must end with a full one."""

    batch_size: int
    seed: int
    workers: int
    collate: Collate
    last: Last | None
    init: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("workers", 0), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                message = f"{name} is {value!r}, not a whole number of {least} or more"
                raise JobError(message, hint=f"set {name} to {least} or more")
        if self.last is not None and self.last not in get_args(Last):
            hint = 'the last micro-batch of an epoch: "drop", "pad", "wrap" or "short"'
            raise JobError(f"last is {self.last!r}", hint=hint)
        if not callable(self.collate):
            hint = "pass a function that makes a micro-batch from a list of samples, or None"
            raise JobError(f"collate is {self.collate!r}, not a function", hint=hint)

    def collated(self, number: int, samples: list[Any]) -> Batch:
        """Return micro-batch `number`, made of `samples`."""
        seed_all(self.seed, "batch", number)
        return self.collate(samples)

    def left_over(
        self, rest: list[Any], first: list[Any], what: str
    ) -> Generator[list[Any], None, list[Any]]:
        """Yield what becomes of the samples left over, if there are any; return those that stay.

        first:    the samples of the epoch's first micro-batch; `what` has such epochs.
        Raises:   JobError: nobody has said.
        """
        match self.last if rest else "drop":
            case "drop":
                return []
            case "wrap":
                return rest
            case "pad":
                yield rest + first[: self.batch_size - len(rest)]
                return []
            case "short" | None:
                message = f"an epoch of {what} ends with {len(rest)} samples"
                hint = 'ps.from_loader(loader, last="drop"), "pad" or "wrap"; or drop_last=True'
                raise JobError(f"{message}; a micro-batch has {self.batch_size}", hint=hint)

    def loader(self, dataset: Any, numbers: Iterable[int] | None = None) -> "DataLoader[Any]":
        """Return what reads ahead in other processes; `dataset` gives whole micro-batches."""
        _compat.let_sockets_have_no_files()
        return DataLoader(
            dataset,
            batch_size=None,
            sampler=numbers,
            num_workers=self.workers,
            collate_fn=same,
            worker_init_fn=self.init,
            generator=torch.Generator(),  # else it draws from everybody's
            multiprocessing_context="fork",
        )


def same(batch: Batch) -> Batch:
    return batch


# -- random numbers -------------------------------------------------------------------------------


def mixed(*values: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


def seed_all(*values: object) -> None:
    """Seed the generators that a dataset may draw from."""
    number = mixed(*values)
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)


@contextmanager
def own_random() -> Generator[None]:
    """Leave those generators as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


# -- what is asked of datasets --------------------------------------------------------------------


def named(dataset: object) -> str:
    return f"the dataset ({type(dataset).__name__})"


def check_length(dataset: object, length: int, batch_size: int) -> None:
    """Raise a JobError unless an epoch has enough samples for one micro-batch."""
    if length >= batch_size:
        return
    name = named(dataset)
    if not length:
        raise JobError(f"{name} is empty", hint="check where it reads its samples from")
    hint = f"set batch_size to {length} or less"
    parts = cast("tuple[object, ...]", dataset) if isinstance(dataset, tuple) else ()
    if parts and all(isinstance(part, torch.Tensor) for part in parts):
        hint = "wrap tensors that belong together: torch.utils.data.TensorDataset(x, y)"
    raise JobError(f"{name} has {length} samples; a micro-batch has {batch_size}", hint=hint)
