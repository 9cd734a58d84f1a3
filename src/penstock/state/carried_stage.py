"""Carried stage: what a rank does for the buffers of a stage that other ranks change, too.

Those with a law c * old + new are carried in parts (carried_buffers.py), those with a row for each
place of a step by rows (placed_rows.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from penstock.state.carried_buffers import Carried, Carry
from penstock.state.placed_rows import PlacedRows
from penstock.transport.transport import Transport


class CarriedStage(NamedTuple):
    """The parts and the rows that one rank holds of a stage's buffers; None: it has none such."""

    parts: Carried | None
    rows: PlacedRows | None

    def begin(self, number: int) -> None:
        """Note that the next micro-batches begin with `number`, on all ranks together."""
        if self.parts is not None:
            self.parts.begin(number)

    def before(self, number: int) -> None:
        """Prepare for F of micro-batch `number`."""
        if self.parts is not None:
            self.parts.before(number)

    def after(self, number: int) -> None:
        """Take in what F of micro-batch `number` made."""
        if self.parts is not None:
            self.parts.after(number)
        if self.rows is not None:
            self.rows.note(number)

    def join(self, number: int, transport: Transport) -> None:
        """Put the whole in place, as before micro-batch `number`; all ranks call it together."""
        if self.parts is not None:
            self.parts.join(number, transport)
        if self.rows is not None:
            self.rows.join(transport)


def carried_stage(carry: Carry, named: Mapping[str, Tensor], rank: int) -> CarriedStage:
    """Return what carries the buffers `named` of a stage on one rank."""
    ranks = next(group for group in carry.groups if rank in group)
    parts = rows = None
    if carry.coefficients:
        tensors = [named[name] for name in carry.coefficients]
        is_first, coefficients = ranks[0] == rank, tuple(carry.coefficients.values())
        parts = Carried(lambda: tensors, coefficients, ranks, is_first)
    if carry.placed:
        placed = [named[name] for name in carry.placed]
        rows = PlacedRows(lambda: placed, next(iter(carry.placed.values())), ranks)
    return CarriedStage(parts, rows)
