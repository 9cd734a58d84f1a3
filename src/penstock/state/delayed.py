"""Delayed: gradients of one step before, summed while a step goes on, as `program/passes/delay.py`.

begin     the gradients that the last step has left are summed, in memory of their own
wait      this step's gradients are left for the next, and what was summed is in their place
"""

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor

from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport


@final
class Delayed:
    """Gradients that a stage keeps for the next step, and the sum of those before.

    left:    by flat tensor of gradients, as large as it.
    """

    def __init__(self, left: Sequence[Tensor]) -> None:
        self.left, self.summed = left, [each.clone() for each in left]

    def sum_over(self, transport: Transport, ranks: tuple[int, ...], topology: str) -> None:
        """Sum what is left of the step before over ranks, bitwise the same on all.

        Raises:   TransportError.
        """
        for summed, left in zip(self.summed, self.left, strict=True):
            summed.copy_(left)
            sum_along(transport, summed, ranks, topology)

    def take(self, flats: Sequence[Tensor]) -> None:
        """Leave these gradients for the next step, and put what was summed in their place."""
        for flat, left, summed in zip(flats, self.left, self.summed, strict=True):
            left.copy_(flat)
            flat.copy_(summed)

    def held(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept besides what is left."""
        yield from self.summed
