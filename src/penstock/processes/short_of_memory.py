"""Short of memory: what a rank, or a command, says whose accelerator has none left."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from penstock.device import Device, here
from penstock.errors import RunError
from penstock.units import format_bytes

_SMALLER = "take smaller micro-batches, or more ranks"
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
    """Return the words for what is held, and a hint.

    predicted:  the peak of the rank; 0: unknown.
    """
    message = f"rank {rank} has {_held_on(device)}"
    if not predicted:
        return message, _SMALLER
    fits = int(_LESS * predicted * min(1.0, device.usable_bytes / max(1, device.held_bytes)))
    message += f"; the plan expects {format_bytes(predicted)} at most"
    size = format_bytes(fits).replace(" ", "")  # one word of a command line
    return message, f"plan for less, as with memory={size}, or smaller micro-batches"


def words_without_plan(problem: BaseException) -> tuple[str, str] | None:
    """Return the words for what is held where no plan runs, as while a job is measured, and a hint.

    None where `problem` is another one.
    """
    if not isinstance(problem, torch.OutOfMemoryError) or here().is_cpu:
        return None
    return f"there is {_held_on(here())}", _SMALLER


def _held_on(device: Device) -> str:
    held, total = device.held_bytes, device.total_bytes
    others = format_bytes(max(0, total - held - device.free_bytes))
    own = f"no memory left on {device.name}: {format_bytes(held)} of its tensors"
    return f"{own} and {others} of others are held of {format_bytes(total)}"
