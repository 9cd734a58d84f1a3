"""Kept reads: what a rank has read of a step that does not count yet, and need not read again.

A step that a loss broke off is done again, and data may be slow: its micro-batches are functions of
their numbers, so those that this rank has read are the same ones.  They are dropped once the step
counts.
"""

from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from penstock.job import Job

_MOST_BYTES = 2**25  # of a step; what is more is read again


@final
class KeptReads:
    """Micro-batches by number, as one job reads them."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._by_number, self._bytes = dict[int, Sequence[Any]](), 0

    def found(self, job: Job, number: int) -> Any:
        """Return the leaves of a micro-batch, or None where it has not been read for this job."""
        return self._by_number.get(number) if job is self._job else None

    def keep(self, job: Job, number: int, leaves: Sequence[Any]) -> None:
        """Keep the leaves of a micro-batch that nobody writes into, if there is room."""
        if job is not self._job:  # another one may count them otherwise
            self.clear()
            self._job = job
        size = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        if self._bytes + size <= _MOST_BYTES:
            self._by_number[number] = leaves
            self._bytes += size

    def clear(self) -> None:
        """Keep nothing."""
        self._by_number, self._bytes = {}, 0
