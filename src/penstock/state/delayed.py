"""Delayed: gradients of steps before, summed while a step goes on, as `program/passes/delay.py`.

begin     the oldest gradients that are left are summed, in memory of their own
wait      this step's gradients are left in their place, and what was summed is in that of these
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import final

from torch import Tensor

from penstock.transport.routed_sums import sum_along
from penstock.transport.transport import Transport


@final
class Delayed:
    """Gradients that a stage keeps for later steps, and the sum of the oldest of them.

    left:    by flat tensor of gradients, as large as it; zeros.
    late:    steps by which an update is later than its gradients: of so many, they are kept.
    by_age:  what is left, the newest first.
    """

    def __init__(self, left: Sequence[Tensor], late: int) -> None:
        self.by_age = deque([left])
        for _ in range(late - 1):
            self.by_age.append([each.clone() for each in left])
        self.summed = [each.clone() for each in left]

    def sum_over(self, transport: Transport, ranks: tuple[int, ...], topology: str) -> None:
        """Sum the oldest gradients that are left over ranks, bitwise the same on all.

        Raises:   TransportError.
        """
        for summed, left in zip(self.summed, self.by_age[-1], strict=True):
            summed.copy_(left)
            sum_along(transport, summed, ranks, topology)

    def take(self, flats: Sequence[Tensor]) -> None:
        """Leave these gradients for a later step, and put what was summed in their place."""
        oldest = self.by_age.pop()
        for flat, left, summed in zip(flats, oldest, self.summed, strict=True):
            left.copy_(flat)
            flat.copy_(summed)
        self.by_age.appendleft(oldest)

    def held(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        yield from chain(*self.by_age, self.summed)
