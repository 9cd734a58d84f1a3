"""Grid: replicas of a pipeline side by side; which ranks are whose, who takes what of a step.

    replica 0   ranks 0 1 2   micro-batches 0 1 2 3 of a step
    replica 1   ranks 3 4 5   micro-batches 4 5

A replica numbers its own micro-batches from 0.  In a window of several steps each step has as
many numbers as the largest share; a smaller one leaves its last ones out.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class InnerAxis(NamedTuple):
    """Ranks that divide a step inside: its ops, or with `context` the tokens of its sequences."""

    ranks: int = 1
    context: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """Replicas of `num_ranks` ranks each; `shares`: the micro-batches of a step, by replica.

    tensor:  so many replicas, one after the other, take the same micro-batches, and divide the ops
             of each stage among them.
    context: those have some tokens each, and all weights: gradients are summed over them, too.
    """

    num_ranks: int
    shares: tuple[int, ...]
    tensor: int = 1
    context: bool = False

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
        return sum(self.shares) // self.tensor

    @property
    def slices(self) -> int:
        """The slices of weights that there are: of those that divide tokens each has all."""
        return 1 if self.context else self.tensor

    def slice_of(self, rank: int) -> int:
        """Return the number of a rank among those that divide the ops of its stages."""
        return self.replica_of(rank) % self.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that divide the ops of the stages of `rank`, itself included."""
        first = rank - self.slice_of(rank) * self.num_ranks
        return tuple(first + at * self.num_ranks for at in range(self.tensor))

    def replica_of(self, rank: int) -> int:
        """Return the replica to which a rank belongs."""
        return rank // self.num_ranks

    def ranks_of(self, replica: int) -> range:
        """Return the ranks of a replica."""
        return range(replica * self.num_ranks, (replica + 1) * self.num_ranks)

    def column_of(self, rank: int) -> range:
        """Return the ranks that have the place of `rank`, and the same weights of its stages."""
        apart = self.num_ranks * self.slices
        return range(rank % apart, self.replicas * self.num_ranks, apart)

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return for every rank its replica, and its place among that replica's ranks."""
        replica, place = np.divmod(np.arange(self.replicas * self.num_ranks), self.num_ranks)
        return replica, place

    def uneven(self, parts: tuple[int, ...]) -> tuple[int, ...]:
        """Return `parts` of every rank in least terms; nothing where replicas have equal ones."""
        columns = (
            [[parts[rank] for rank in self.column_of(at)] for at in self.ranks_of(0)]
            if parts
            else []
        )
        if all(len(set(column)) == 1 for column in columns):
            return ()
        least = [gcd(*column) for column in columns]
        return tuple(part // least[at % self.num_ranks] for at, part in enumerate(parts))

    def part_of(self, rank: int, parts: tuple[int, ...]) -> Fraction:
        """Return the share of its column's stages that a rank keeps."""
        if not parts:
            return Fraction(self.slices, self.replicas)
        return Fraction(parts[rank], sum(parts[other] for other in self.column_of(rank)))

    def in_step(self, replica: int, number: int) -> tuple[int, int]:
        """Return (step, place) of a replica's micro-batch in its window.

        place:    among the step's micro-batches, counting those of the replicas before it.
        """
        step, place = divmod(number, self.stride)
        before = self.shares[: replica - replica % self.tensor]
        return step, sum(before) // self.tensor + place


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


def misplaced(parts: tuple[int, ...], grid: Grid) -> tuple[str, str] | None:
    """Return why `parts` are no parts of the ranks of a grid, and a hint; None where they are."""
    ranks = grid.replicas * grid.num_ranks
    if parts and (len(parts) != ranks or min(parts) < 0):
        problem = f"parts are {written(parts)}, for {ranks} ranks"
        return problem, "give each rank a whole number, 0 or more"
    for first in grid.ranks_of(0) if parts else ():
        if not any(parts[rank] for rank in grid.column_of(first)):
            ranks_here = ", ".join(map(str, grid.column_of(first)))
            return f"ranks {ranks_here} keep no part of what they divide", "give one of them 1"
    return None


def unlike(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shares`, or nothing if all are alike."""
    return shares if len(set(shares)) > 1 else ()
