"""Overlap: what goes on beside the computes of a plan, and how long before it is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from penstock.errors import PlanError

Prefetch: TypeAlias = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """What begins before it is needed.

    prefetch:   how many stages before its use the gathering of a divided stage begins, or the
                loading of one whose weights are in far memory; or by stage, where that is not
                the same for all.
    beside:     whether what is in far memory is copied there and back while the rank computes.
    early:      computes by which each receive is posted before the one that it is posted for; over
                gloo a message moves only then.
    """

    prefetch: Prefetch = 0
    beside: bool = False
    early: int = 0

    def __post_init__(self) -> None:
        if self.early < 0:
            raise PlanError(f"early is {self.early} computes; it must be 0 or more")
        if least_of(self.prefetch) < 0:
            raise PlanError(f"prefetch is {self.prefetch} stages", hint="give 0 or more")
        if self.prefetch != prefetch_of(self.prefetch):
            message = f"prefetch is {self.prefetch}, which is one number for all stages"
            raise PlanError(message, hint=f"give {prefetch_of(self.prefetch)}")

    def by_stage(self, stages: int) -> tuple[int, ...]:
        """Return how many stages ahead each of so many stages is gathered or loaded."""
        row = self.prefetch
        return (row,) * stages if isinstance(row, int) else row


def prefetch_of(row: int | Sequence[int]) -> Prefetch:
    """Return what a plan says of stages that are gathered or loaded so early: one number for all
    of them where they are alike."""
    if isinstance(row, int):
        return row
    return row[0] if len({*row}) == 1 else tuple(row)


def most_of(prefetch: Prefetch) -> int:
    """Return the most of any stage."""
    return prefetch if isinstance(prefetch, int) else max(prefetch)


def least_of(prefetch: Prefetch) -> int:
    """Return the least of any stage."""
    return prefetch if isinstance(prefetch, int) else min(prefetch)
