"""Grid: replicas of a pipeline side by side; which ranks are whose, who takes what of a step.

    replica 0   ranks 0 1 2   micro-batches 0 1 2 3 of a step
    replica 1   ranks 3 4 5   micro-batches 4 5

A replica numbers its own micro-batches from 0.  In a window of several steps each step has as
many numbers as the largest share; a smaller one leaves its last ones out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Grid:
    """Replicas of `num_ranks` ranks each; `shares`: the micro-batches of a step, by replica."""

    num_ranks: int
    shares: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return len(self.shares)

    @property
    def stride(self) -> int:
        """The numbers that a step has in a window: the largest share."""
        return max(self.shares)

    @property
    def step_micro_batches(self) -> int:
        """The micro-batches of a step, over all replicas."""
        return sum(self.shares)

    def replica_of(self, rank: int) -> int:
        """Return the replica to which a rank belongs."""
        return rank // self.num_ranks

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of a replica."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)

    def column_of(self, rank: int) -> range:
        """Return the ranks that have the place of `rank`, one in each replica."""
        return range(rank % self.num_ranks, self.replicas * self.num_ranks, self.num_ranks)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for every rank its replica, and its place among that replica's ranks."""
        replica, place = np.divmod(np.arange(self.replicas * self.num_ranks), self.num_ranks)
        return replica, place

    def in_step(self, replica: int, number: int) -> tuple[int, int]:
        """Return (step, place) of a replica's micro-batch in its window.

        place:    among the step's micro-batches, counting those of the replicas before it.
        """
        step, place = divmod(number, self.stride)
        return step, sum(self.shares[:replica]) + place


def evenly(micro_batches: int, replicas: int) -> tuple[int, ...]:
    """Return shares that differ by at most 1, the larger ones first."""
    share, left = divmod(micro_batches, replicas)
    return (share + 1,) * left + (share,) * (replicas - left)


def written(shares: tuple[int, ...]) -> str:
    """Return shares as people read them, as "3 + 3 + 2"."""
    return " + ".join(map(str, shares))


def misfit(shares: tuple[int, ...], replicas: int, largest: int) -> tuple[str, str] | None:
    """Return why `shares` are no shares of that many replicas, and a hint; None where they are.

    No shares at all stand for equal ones.
    """
    if shares and (len(shares) != replicas or min(shares) < 1):
        problem = f"shares are {written(shares)}, for {replicas} replicas"
        return problem, "give each replica 1 micro-batch or more"
    if shares and max(shares) != largest:
        return f"shares are {written(shares)}, not {largest}", "num_micro_batches is the largest"
    return None


def unlike(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shares`, or nothing if all are alike."""
    return shares if len(set(shares)) > 1 else ()
