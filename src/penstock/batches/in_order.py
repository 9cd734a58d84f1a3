"""In order: data that is read from its beginning, wherever a run goes on.

Where a micro-batch is no function of its number, only reading them all tells which one it is.
"""

import random
from collections.abc import Iterator

import numpy as np

from penstock.batches.reads import Data, started
from penstock.job import Batch


class InOrder:
    """A job's data, read from its beginning.

    drew:  whether it drew from the generators of Python or numpy after its first micro-batch, when
           it was read up to where it goes on.
    """

    def __init__(self, data: Data) -> None:
        self.data, self.drew = data, False
        self._begun: tuple[int, Iterator[Batch]] | None = None

    def begin(self, start: int) -> Iterator[Batch]:
        """Read and drop what comes before micro-batch `start`, from where the next call goes on."""
        batches, first = started(self.data, 0), None
        for number in range(start):
            next(batches, None)
            first = _position() if number == 0 else first
        self.drew = first is not None and first != _position()
        self._begun = start, batches
        return batches

    def __call__(self, start: int) -> Iterator[Batch]:
        """Return the micro-batches from number `start` on."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] == start:
            return begun[1]
        batches = self.begin(start)
        self._begun = None
        return batches


def _position() -> tuple[object, ...]:
    kind, key, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, bytes(key), *rest  # pyright: ignore
