"""Device peak: the most bytes of an accelerator that a rank holds while something runs."""

from collections.abc import Callable
from typing import TypeVar

from penstock.device import Device

T = TypeVar("T")


def with_peak(device: Device, held_bytes: Callable[[], int], run: Callable[[], T]) -> tuple[T, int]:
    """Return the result of `run()`, and the most bytes that the rank held meanwhile; 0 on a CPU.

    That is what it held before, and what the device held more than before at most: an optimizer's
    state that the run itself makes counts once.  What is there for another reason is left out.
    """
    if device.is_cpu:
        return run(), 0
    own, before = held_bytes(), device.reset_peak()
    made = run()
    return made, own + device.peak_bytes - before
