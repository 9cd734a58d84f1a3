"""Calibrate: what a device reaches in each class of ops, in rounds whose spread is kept.

    product, convolution, attention      FLOP/s
    reduction, gather, element-wise,     bytes/s, read and written
    copy
    launch                               seconds of an op that has little to do

Each task runs alone on this device, in rounds of a tenth of a second or so; all take turns, so that
what disturbs the machine for a while disturbs them alike.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from penstock.device import Device, here
from penstock.units import MiB

Unit: TypeAlias = Literal["FLOP/s", "bytes/s", "s"]
_ROUNDS = (7, 60)  # of each task: at least, at most
_ROUND_S = 0.05  # a round repeats its task for as long
_MOVED_BYTES = 64 * MiB  # of a tensor: more than caches hold
_WIDTH, _QUEUED_WIDTH = 768, 8192  # of the matrices of a product; on devices that queue
_CALLS = 300


class Calibrated(NamedTuple):
    """The rate of a task: median, first and ninth tenth of its rounds."""

    what: str
    unit: Unit
    value: float
    low: float
    high: float
    rounds: int


class OpTask(NamedTuple):
    """Something to compute, and how much of its unit it is."""

    what: str
    unit: Unit
    run: Callable[[], object]
    amount: float


def calibrated(budget_s: float) -> tuple[Calibrated, ...]:
    """Return the rates of every class of ops on this device, in about `budget_s` seconds.

    Products in float32; on devices that queue in bfloat16, too.
    """
    device = here()
    tasks = tuple(tasks_on(device))
    return rates_by_turns(tasks, device, budget_s / len(tasks))


def tasks_on(device: Device) -> Iterator[OpTask]:
    """Yield the tasks of every class of ops, at sizes that keep `device` busy."""
    place, large = device.place, device.is_queued
    width = _QUEUED_WIDTH if large else _WIDTH
    for dtype in (torch.float32, torch.bfloat16) if large else (torch.float32,):
        a = torch.ones(width, width, device=place, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        yield OpTask(f"product {name}", "FLOP/s", lambda a=a: torch.mm(a, a), 2.0 * width**3)
    samples, channels = (64, 128) if large else (4, 64)
    image = torch.ones(samples, channels, 28, 28, device=place)
    kernel = torch.ones(channels, channels, 3, 3, device=place)
    yield OpTask(
        "convolution",
        "FLOP/s",
        lambda: functional.conv2d(image, kernel, padding=1),
        2.0 * samples * 28 * 28 * channels * channels * 9,
    )
    heads, tokens, size = (64, 4096, 128) if large else (8, 256, 64)
    query = torch.ones(1, heads, tokens, size, device=place, dtype=torch.float32)
    yield OpTask(
        "attention",
        "FLOP/s",
        lambda: functional.scaled_dot_product_attention(query, query, query),
        4.0 * heads * tokens**2 * size,
    )
    count = max(_MOVED_BYTES, 2 * device.cache_bytes) // 4
    rows, other = (torch.zeros(count // 1024, 1024, device=place) for _ in range(2))
    moved = 4.0 * rows.numel()
    yield OpTask("reduction", "bytes/s", lambda: rows.sum(dim=1), moved)
    order = torch.randperm(len(rows), device=place)
    yield OpTask("gather", "bytes/s", lambda: torch.index_select(rows, 0, order), 2 * moved)
    yield OpTask("element-wise", "bytes/s", lambda: rows.add_(other), 3 * moved)
    yield OpTask("copy", "bytes/s", lambda: rows.copy_(other), 2 * moved)
    small = torch.zeros(8, device=place)
    yield OpTask("launch", "s", lambda: [small.add_(1.0) for _ in range(_CALLS)], _CALLS)


def rates_by_turns(
    tasks: Sequence[OpTask], device: Device, budget_s: float
) -> tuple[Calibrated, ...]:
    """Return the rates of tasks that take turns, each in about `budget_s` seconds."""
    sizes = [_round_of(task, device, budget_s) for task in tasks]
    took = tuple(list[float]() for _ in tasks)
    for number in range(max(size.rounds for size in sizes)):
        for task, size, seconds in zip(tasks, sizes, took, strict=True):
            if number < size.rounds:
                seconds.append(_seconds(task, device, size.times) / size.times)
    return tuple(map(_rate, tasks, took))


class _TaskRounds(NamedTuple):
    """How often a task runs in a round, and how many rounds it has."""

    times: int
    rounds: int


def _round_of(task: OpTask, device: Device, budget_s: float) -> _TaskRounds:
    once_s = _seconds(task, device, 1)
    once_s = min(once_s, _seconds(task, device, 1))  # the first one compiles or fills caches
    times = max(1, round(_ROUND_S / once_s))
    least, most = _ROUNDS
    return _TaskRounds(times, min(most, max(least, int(budget_s / (times * once_s)))))


def _rate(task: OpTask, took: Sequence[float]) -> Calibrated:
    rates = [each / task.amount if task.unit == "s" else task.amount / each for each in took]
    tenths = statistics.quantiles(rates, n=10)
    low, high = max(tenths[0], min(rates)), min(tenths[-1], max(rates))
    return Calibrated(task.what, task.unit, statistics.median(rates), low, high, len(rates))


def _seconds(task: OpTask, device: Device, times: int) -> float:
    start = device.mark()
    for _ in range(times):
        task.run()
    return max(device.seconds_between(start, device.mark()), 1e-9)
