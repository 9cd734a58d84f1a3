"""Reader: one rank's place in the job's data, and the order in which it reads.

What is read is copied before anything else is: data may fill one buffer again and again, and a
rank holds several micro-batches at a time.  A plain loop in one process copies nothing: what its
loss writes into the memory of a dataset stays there.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, cast

import torch

from penstock import _compat
from penstock.batches.reads import ReadNumbers, read
from penstock.errors import RunError
from penstock.graph.contents import own_apart
from penstock.job import Job
from penstock.processes.lost_readers import MOST, LostReaders, is_lost
from penstock.runtime.kept_reads import KeptReads

T = TypeVar("T")
Take = Callable[[Any, torch.device], Any]


class ReadOrder(NamedTuple):
    """Which micro-batches a rank reads in a window, in order; window after window the same.

    places:    their numbers, counted from the window's first.
    every:     micro-batches of a window, over all ranks.
    per_step:  micro-batches of a step, over all ranks.
    """

    places: list[int]
    every: int
    per_step: int


class Reader:
    """Reads the job's data in an order, and restarts it where another number is requested.

    take:  makes of a batch what is on the device: `own_apart` for a traced step, which writes into
           none; `own` or `seen` for the job's own loss, which may.
    kept:  where a step may be done again: what was read of it.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        *,
        take: Take = own_apart,
        kept: KeptReads | None = None,
    ) -> None:
        self.job, self.device, self._take, self._kept = job, device, take, kept
        self._batches: Iterator[Any] = iter(())
        self._numbers: Iterator[int] = iter(())
        self._lost = LostReaders()

    def read(self, reads: ReadNumbers, fitting: Callable[[Any], T]) -> T:
        """Return `fitting(batch)` of the next micro-batch of `reads`.

        Raises:   RunError: the data ended.  What `fitting` raises.
        """
        number, kept = reads.next_number(), self._kept
        if kept is not None and (known := kept.found(self.job, number)) is not None:
            return known
        for deaths in itertools.count():
            try:
                # the data of several threads may have one buffer, and draw
                with _compat.GENERATOR, self._lost:
                    found = self._read(number, reads, fitting)
                if kept is not None:
                    kept.keep(self.job, number, cast(list[Any], found))
                return found
            except (RuntimeError, OSError, EOFError) as problem:
                if deaths == MOST or not is_lost(problem):
                    raise
                words = " ".join(str(problem).split())
                sys.stderr.write(f"{words}: reading goes on by others from micro-batch {number}\n")
                self._batches = self._numbers = iter(())  # which are begun anew
        raise AssertionError("it returns or raises")

    def _read(self, number: int, reads: ReadNumbers, fitting: Callable[[Any], T]) -> T:
        """Return `fitting(batch)` of micro-batch `number`, the next one of `reads`.

        Raises:   as `read`.
        """
        if next(self._numbers, None) != number:
            self._batches, self._numbers = read(self.job.data, reads), reads.numbers()
            next(self._numbers)
        for batch in self._batches:
            return self._take(fitting(batch), self.device)
        hint = "make `data` endless, or train fewer steps"
        raise RunError(f"the job's data ended at micro-batch {number}", hint=hint)
