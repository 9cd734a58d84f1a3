"""Overlap: what goes on beside the computes of a plan, and how long before it is needed."""

from dataclasses import dataclass

from penstock.errors import PlanError


@dataclass(frozen=True, slots=True)
class Overlap:
    """What begins before it is needed.

    prefetch:   how many stages before its use the gathering of a divided stage begins, or the
                loading of one whose weights are in far memory.
    beside:     whether what is in far memory is copied there and back while the rank computes.
    early:      computes by which each receive is posted before the one that it is posted for; over
                gloo a message moves only then.
    """

    prefetch: int = 0
    beside: bool = False
    early: int = 0

    def __post_init__(self) -> None:
        if self.early < 0:
            raise PlanError(f"early is {self.early} computes; it must be 0 or more")
        if self.prefetch < 0:
            raise PlanError(f"prefetch is {self.prefetch} stages", hint="give 0 or more")
