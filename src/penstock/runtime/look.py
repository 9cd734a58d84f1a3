"""Look: the numbers of a step that the host has to see on a device that queues, seen all at once.

Each look makes the host wait until all is done that was queued before, and the device then waits
for what is queued next.  So the norm of the gradients clips on the device, and is seen with the
mean loss before the update behind it; the report says what was seen.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from penstock.device import of
from penstock.runtime.finite import refuse_loss

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


class UnseenNorm(NamedTuple):
    """The norm by which the gradients of a step of the run were clipped, and of each parameter."""

    total: Tensor
    norms: Tensor
    names: Sequence[str]
    step: int


def look(rank: "Rank", step: int, losses: Sequence[Tensor]) -> None:
    """Raise unless what is not seen yet of a step is finite: its norm, and its losses, if any.

    step:     of the window.
    Raises:   NotFiniteError.
    """
    progress = rank.progress
    norm, progress.unseen = progress.unseen, None
    values = [] if norm is None else [norm.total.double()]
    if losses:
        values.append(torch.stack([loss.reshape(()) for loss in losses]).double().mean())
    if not values:
        return
    device = of(rank.device)
    seen = device.read(torch.stack(values))
    if norm is not None and not math.isfinite(seen[0]):
        pairs = zip(norm.names, device.read(norm.norms), strict=False)
        bad = [name for name, own in pairs if not math.isfinite(own)]
        rank.refuse_norm(seen[0], norm.step, bad)
    if losses:
        number = progress.first_step + step
        if not math.isfinite(seen[-1]):
            refuse_loss(seen[-1], number, rank.numbers(number))
        progress.seen_losses[step] = seen[-1]
