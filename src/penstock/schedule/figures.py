"""Figures of a schedule: the seconds its ranks idle, and the activations they hold."""

import numpy as np

from penstock.schedule.orders import B, F, W
from penstock.schedule.schedule import Schedule


def bubble(
    schedule: Schedule, *, forward_s: float = 1.0, input_s: float = 1.0, weights_s: float = 1.0
) -> tuple[float, ...]:
    """Return, for each rank, the seconds that it idles in the window.

    That is the end of the last action of all ranks less what the rank itself works, when F takes
    `forward_s`, I `input_s`, W `weights_s` and B, which is I and W, the sum of these two.

    Ignores:  updates, messages, and differences between stages, ranks and micro-batches.
    """
    idle_s, _ = _idle_s(schedule, (forward_s, input_s + weights_s, input_s, weights_s, 0.0))
    return idle_s


def bubble_fraction(
    schedule: Schedule, *, forward_s: float = 1.0, input_s: float = 1.0, weights_s: float = 1.0
) -> float:
    """Return the idle part of all ranks' time in the window: `bubble` without its unit."""
    seconds = (forward_s, input_s + weights_s, input_s, weights_s, 0.0)
    idle_s, window_s = _idle_s(schedule, seconds)
    return sum(idle_s) / (window_s * schedule.num_ranks) if window_s > 0 else 0.0


def _idle_s(schedule: Schedule, seconds: tuple[float, ...]) -> tuple[tuple[float, ...], float]:
    orders = schedule.orders
    _, end_s = schedule.play(seconds)
    window_s = float(end_s.max())
    idle_s: list[float] = []
    for rank in range(len(orders)):
        counts = np.bincount(orders.kinds[orders.slice_of(rank)], minlength=len(seconds))
        idle_s.append(window_s - float(counts @ np.array(seconds)))
    return tuple(idle_s), window_s


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, how many activations it holds at most.

    One is held for a (stage, micro-batch) from its F until its B, or its W, is done; none where the
    schedule has no backward.
    """
    orders = schedule.orders
    if not np.isin(orders.kinds, (B, W)).any():
        return (0,) * len(orders)
    change = np.zeros(5, np.int64)
    change[[F, B, W]] = 1, -1, -1
    peaks: list[int] = []
    for rank in range(len(orders)):
        held = np.cumsum(change[orders.kinds[orders.slice_of(rank)]])
        peaks.append(int(held.max(initial=0)))
    return tuple(peaks)
