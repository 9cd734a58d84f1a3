"""Benchmark: what a rank computes in a second, by three small tasks.

    products   of matrices                  FLOP/s in float32
    moved      numbers added in memory      bytes/s read and written
    calls      of ops that have little to do

All ranks run them at the same time, as they compute in a run.  A rank's capability is the seconds
of a piece of training: so many FLOP, bytes and calls.

Source:   SpanTrain, arXiv:2505.15536 (the sum of benchmark tasks' seconds, weighted).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from penstock.device import Device, here
from penstock.units import GB, MiB

_WIDTH, _QUEUED_WIDTH = 512, 4096  # of the matrices; on devices that queue
_ADDED_BYTES = 64 * MiB  # of each of two tensors: more than caches hold, three times that together
_CALLS = 500
_ROUNDS = 15
_PIECE = (4.0 * GB, 1.0 * GB, 1000)  # FLOP, bytes and calls of a piece of training


class Benchmark(NamedTuple):
    """What the tasks took: seconds for a FLOP of products, for a byte moved, for a call."""

    flop_s: float
    byte_s: float
    call_s: float

    @property
    def seconds(self) -> float:
        """Return the capability: seconds of 4 GFLOP of products, 1 GB moved and 1,000 calls."""
        return sum(amount * each for amount, each in zip(_PIECE, self, strict=True))


def benchmark() -> Benchmark:
    """Return what this thread computes, in a third of a second: the best of 15 rounds."""
    device = here()
    width = _QUEUED_WIDTH if device.is_queued else _WIDTH
    a, product = torch.ones(2, width, width, device=device.place)
    count = max(_ADDED_BYTES, 2 * device.cache_bytes) // 4
    there, near = torch.zeros(2, count, device=device.place)
    small = torch.zeros(8, device=device.place)

    def calls() -> None:
        for _ in range(_CALLS):
            small.add_(1.0)

    tasks: tuple[tuple[Callable[[], object], float], ...] = (
        (lambda: torch.mm(a, a, out=product), 2.0 * width**3),
        (lambda: near.add_(there), 12.0 * count),  # both are read, one is written
        (calls, _CALLS),
    )
    return Benchmark(*(_best_s(task, device) / amount for task, amount in tasks))


def _best_s(task: Callable[[], object], device: Device) -> float:
    took: list[float] = []
    for _ in range(_ROUNDS):
        start = device.mark()
        task()
        took.append(device.seconds_between(start, device.mark()))
    return max(min(took), 1e-9)
