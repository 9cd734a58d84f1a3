"""Short of memory: what a rank says whose accelerator has none left."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from penstock.device import Device, here
from penstock.errors import RunError
from penstock.units import format_bytes

_LESS = 0.9  # of what the plan would be allowed to hold for all to fit, by what is known now


@contextmanager
def telling_what_is_held(rank: int, predicted: Sequence[int]) -> Generator[None]:
    """Let an accelerator that has no memory left say so, beside what the plan expected.

    predicted:  the peak of each rank; empty where nobody predicts any.
    Raises:     RunError: it has none left.
    """
    try:
        yield
    except torch.OutOfMemoryError as problem:
        held, expected = words(here(), rank, predicted[rank] if rank < len(predicted) else 0)
        raise RunError(held, hint=expected) from problem


def words(device: Device, rank: int, predicted: int) -> tuple[str, str]:
    """Return what is held, and what to do about it.

    predicted:  the peak of the rank; 0: unknown.
    """
    held, total = device.held_bytes, device.total_bytes
    message = (
        f"rank {rank} has no memory left on {device.name}: {format_bytes(held)} of its tensors"
    )
    message += f" and {format_bytes(max(0, total - held - device.free_bytes))} of others are held"
    message += f" of {format_bytes(total)}"
    if not predicted:
        return message, "take smaller micro-batches, or more ranks"
    fits = int(_LESS * predicted * min(1.0, device.usable_bytes / max(1, held)))
    message += f"; the plan expects {format_bytes(predicted)} at most"
    return (
        message,
        f"plan for less, as with --memory {format_bytes(fits)}, or smaller micro-batches",
    )
