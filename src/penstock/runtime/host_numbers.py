"""Host numbers: what the host has to see of a step on a device that queues, seen all at once.

Each look makes the host wait until all is done that was queued before, and the device then waits
for what is queued next.  So the norm of the gradients clips on the device, and is seen with the
mean loss before the update behind it; the report says what was seen.  Where the loss is scaled it
is all seen with whether gradients overflow, which the update has to know.
"""

import math
from collections.abc import Callable, Sequence
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


class SeenBeside(NamedTuple):
    """Numbers that are seen with those of a step, and what takes them first, and may raise."""

    numbers: Tensor
    take: Callable[[list[float]], None]


def look(
    rank: "Rank",
    step: int,
    losses: Sequence[Tensor],
    *,
    flag: Tensor | None = None,
    beside: SeenBeside | None = None,
) -> bool:
    """Return whether `flag` is on; raise unless what is not seen yet of a step is finite.

    That is its norm, unless the flag is on, and its losses, if any.
    step:     of the window.
    Raises:   NotFiniteError.
    """
    progress = rank.progress
    norm, progress.unseen = progress.unseen, None
    losses = () if step in progress.seen_losses else losses  # they were seen before
    values = [] if norm is None else [norm.total.double().reshape(1)]
    values += [] if flag is None else [flag.double().reshape(1)]
    if losses:
        mean = torch.stack([loss.reshape(()) for loss in losses]).double().mean()
        values.append(mean.reshape(1))
    count = len(values)
    values += [] if beside is None else [beside.numbers]
    if not values:
        return False
    device = of(rank.device)
    seen = device.read(torch.cat(values))
    if beside is not None:
        beside.take(seen[count:])
        del seen[count:]
    is_on = flag is not None and bool(seen[0 if norm is None else 1])
    minds = flag is None or (rank.is_guarded and not is_on)
    if norm is not None and minds and not math.isfinite(seen[0]):
        pairs = zip(norm.names, device.read(norm.norms), strict=False)
        bad = [name for name, own in pairs if not math.isfinite(own)]
        rank.refuse_norm(seen[0], norm.step, bad)
    if losses:
        number = progress.first_step + step
        if not math.isfinite(seen[-1]):
            refuse_loss(seen[-1], number, rank.numbers(number))
        progress.seen_losses[step] = seen[-1]
    return is_on
