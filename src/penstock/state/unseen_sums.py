"""Unseen sums: what a device that queues knows of summed gradients that are in far memory.

They are there to be loaded for the update, and nobody can look at them meanwhile without waiting
for the device.  So their norms are taken, and whether they are finite is asked, before they leave;
and what they are to be multiplied by, to clip them or to take the loss's scale out, waits here
until they are back.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from penstock import _compat


@final
class UnseenSums:
    """Norms, of the parameters that lie in each flat tensor of a rank's part, and a factor.

    places:  of each flat tensor, the parameters in it by node, and where.
    """

    def __init__(self, flats: Sequence[Tensor], places: Sequence[dict[int, slice]]) -> None:
        self.places = places
        self._norms = [flat.new_zeros(len(own)) for flat, own in zip(flats, places, strict=True)]
        device = flats[0].device if flats else torch.device("cpu")
        self._finite = torch.ones(len(flats), dtype=torch.bool, device=device)
        self._factor = torch.ones((), device=device)

    def leave(self, number: int, flat: Tensor) -> None:
        """Take note of the numbers of a flat tensor, which are about to leave."""
        self._finite[number].copy_(torch.isfinite(flat).all())
        parts = [flat[place] for place in self.places[number].values()]
        if parts:
            self._norms[number].copy_(torch.stack(_compat.gradient_norms(parts)))
        self._factor.fill_(1.0)

    def norms(self, nodes: Sequence[int]) -> list[Tensor]:
        """Return the norms of gradients as they will be, by what is known of them now."""
        rows = zip(self.places, self._norms, strict=True)
        known = {node: norm for own, row in rows for node, norm in zip(own, row, strict=True)}
        return [known[node] * self._factor.to(known[node].dtype) for node in nodes]

    def are_finite(self) -> Tensor:
        """Return whether all of them were finite when they left."""
        return self._finite.all()

    def scale(self, factor: Tensor | float) -> None:
        """Let them be multiplied by `factor` once they are back."""
        self._factor.mul_(factor)

    def came(self, flats: Sequence[Tensor]) -> None:
        """Multiply what is back."""
        for flat in flats:
            flat.mul_(self._factor.to(flat.dtype))
