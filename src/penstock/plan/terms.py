"""Terms: what a step of a plan computes, and with how many bits."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from penstock.bits import AS_IT_IS, is_wire_bits
from penstock.errors import PlanError
from penstock.taken import Taken

Buffers = Literal["exact", "one copy", "per replica"]


@dataclass(frozen=True, slots=True)
class StepTerms:
    """What a step computes.

    joined:     of the job's micro-batches that make one of the plan's: several, one, or a part of
                one, 1 / n, where each is divided among n (docs/plan.md).
    split:      (name, slices) of each parameter that the graph has in slices.
    buffers:    which values those that forward writes have: "exact", those of the plain loop; "one
                copy", likewise, by one copy of each stage that takes its micro-batches in order;
                "per replica", those of the first replica.
    wire:       bits of a number in messages of activations, and of gradients, between ranks
                (graph/wire.py); 32: as it is.
    compiled:   whether runs of ops are compiled as one (graph/fused_runs.py): equal to rounding.
    """

    joined: Taken = 1
    split: tuple[tuple[str, int], ...] = ()
    buffers: Buffers = "exact"
    wire: tuple[int, int] = (AS_IT_IS, AS_IT_IS)
    compiled: bool = False

    def __post_init__(self) -> None:
        joined = self.joined
        if joined <= 0 or (joined != int(joined) and Fraction(joined).numerator != 1):
            raise PlanError(f"joined is {joined}; it must be 1 or more, or a part: 1/2, 1/3, ...")
        names = [name for name, _ in self.split]
        if names != sorted({*names}) or any(count < 2 for _, count in self.split):
            message = f"split says {dict(self.split)}, not slices of parameters by name"
            raise PlanError(message, hint="give each parameter once, in 2 slices or more")
        if self.buffers not in get_args(Buffers):
            raise PlanError(f"buffers are {self.buffers!r}, not one of {get_args(Buffers)}")
        if not all(map(is_wire_bits, self.wire)):
            raise PlanError(f"wire is {self.wire} bits; each is 2 to 16, or 32")

    @property
    def rounds(self) -> bool:
        """Return whether numbers are rounded on their way between ranks."""
        return self.wire != (AS_IT_IS, AS_IT_IS)
