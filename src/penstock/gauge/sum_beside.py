"""Sums beside computes: two ranks do the same work in four ways, and what of it overlaps.

    alone             the computes; the sum
    one by one        the computes, then the sum
    at once           the sum on a lane of its own, as in a run, while the thread computes

Both ranks have one core each.  What computes that outlast a sum take longer with it is what the sum
takes of a rank's core: a line through its size is kept with the link (`Link.sum_core_s`), and the
simulator takes it off computes beside sums.

Source:  arXiv:2507.03114 (the executions, the slowdown of computing, the gain of overlap).
"""

import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from penstock.cluster.cluster import Cluster, DeviceKind, Host, Link
from penstock.device import Device, here
from penstock.program.edges import StageBytes, StageGraph
from penstock.program.lower import chain, lower_schedule
from penstock.runtime.lane import Begun, Lane, Queued
from penstock.schedule.breadth_first import breadth_first
from penstock.schedule.orders import Action
from penstock.simulate.simulate import simulate
from penstock.transport.transport import Transport
from penstock.units import KiB, MiB

SIZES = tuple(times * KiB for times in (512, 1024, 2048, 4096, 8192, 16384))
QUEUED_SIZES = tuple(times * MiB for times in (4, 8, 16, 32, 64, 128))  # on devices that queue
WAYS = ("computes alone", "sum alone", "one by one", "at once")
_LONGER = 1.5  # computes take so many times as long as the sum
_LEAST_S = 0.02  # of a round: smaller sums are repeated
_SLOW_S = 0.3  # sums that take longer are left out
_ROUNDS = (7, 15)  # at least, at most
_BUDGET_S = 5.0  # for the rounds beyond the least
_WIDTH, _QUEUED_WIDTH = 192, 2048  # of the matrices of a compute
_SWEPT_BYTES = 32 * MiB  # that sums of one size go through
_TRIED = 7  # calls, by the fastest of which it is said how much to do
_PRODUCTS = 100  # that are timed to know how many make a compute


class Tenths(NamedTuple):
    """Seconds of some rounds: the median, and the first and the ninth tenth."""

    median_s: float
    low_s: float
    high_s: float

    @property
    def spread(self) -> float:
        """Return half of what lies between the tenths, as a part of the median."""
        return (self.high_s - self.low_s) / 2 / self.median_s


@dataclass(frozen=True, slots=True)
class SumBeside:
    """What a sum of one size took of two ranks, the slower one of each round.

    beside_s:  of the computes alone, while the sum was under way.
    """

    size_bytes: int
    compute: Tenths
    sum: Tenths
    one_by_one: Tenths
    at_once: Tenths
    beside_s: float

    @property
    def core_s(self) -> float:
        """Return what the sum costs computes that outlast it: at_once - compute, 0 to the sum."""
        return min(self.sum.median_s, max(0.0, self.at_once.median_s - self.compute.median_s))

    @property
    def slowdown(self) -> float:
        """Return how many times longer the computing thread takes, less 1; nothing is below 0."""
        return max(0.0, self.beside_s / self.compute.median_s - 1)

    @property
    def gain(self) -> float:
        """Return which part of one by one is saved by doing both at once."""
        return 1 - self.at_once.median_s / self.one_by_one.median_s


# -- what it costs, as a line ---------------------------------------------------------------------


def with_sums(link: Link, measured: Sequence[SumBeside]) -> Link:
    """Return the link with what sums beside computes take of a core; as it is with fewer than two.

    core_s + size_bytes / core_bytes_per_s, with the least squares of what computes and sum at once
    would be off, relative to what they take.
    """
    if len(measured) < 2:
        return link
    rows = [(one.size_bytes, one.core_s, one.at_once.median_s) for one in measured]
    start_s, per_byte_s = _line(rows)
    start_s = max(start_s, 1e-9)  # a link of which nothing was measured has 0
    rate = 1 / per_byte_s if per_byte_s > 0 else math.inf
    return replace(link, core_s=start_s, core_bytes_per_s=rate)


def _line(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return a, b >= 0 of a + b * size, with the least squares of (it - seconds) / weight."""
    sizes, seconds, weights = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    both, wanted = (
        np.stack([np.ones(len(sizes)), sizes], axis=1) / weights[:, None],
        seconds / weights,
    )
    best, found = math.inf, np.zeros(2)
    for columns in ([0, 1], [0], [1]):
        solved = np.zeros(2)
        solved[columns] = np.linalg.lstsq(both[:, columns], wanted, rcond=None)[0]
        error = float(((both @ solved - wanted) ** 2).sum())
        if error < best and (solved >= 0).all():
            best, found = error, solved
    return float(found[0]), float(found[1])


def predicted_s(measured: Sequence[SumBeside], wanted: SumBeside) -> float:
    """Return what computes and sum of `wanted` at once take by the simulator, from other sizes.

    Two replicas of two stages: the second's gradients are summed beside the backward of the first,
    which takes as long as the computes did.  All that is known of sums is from the other sizes.
    """
    others = [one for one in measured if one.size_bytes != wanted.size_bytes]
    rows = [(one.size_bytes, one.sum.median_s, one.sum.median_s) for one in others]
    start_s, per_byte_s = _line(rows)
    rate = 1 / per_byte_s if per_byte_s > 0 else math.inf
    link = with_sums(Link(start_s / 2, rate), others)
    kind = DeviceKind("device", MiB, (), 1.0)
    cluster = Cluster((kind,), (Host("host", kind.name, 2, cores=2),), link)
    held = StageBytes(), StageBytes(weights=wanted.size_bytes)
    graph = StageGraph(chain(2), stage_bytes=held)
    program = lower_schedule(breadth_first(2, 1, num_ranks=1), graph, replicas=2)

    def seconds(action: Action) -> float:
        return wanted.compute.median_s if (action.kind, action.stage) == ("B", 0) else 0.0

    spans = [span for span in simulate(program, seconds, cluster).spans if span.rank == 0]
    computed_s = max(span.end_s for span in spans if span.lane == "compute")
    return max(computed_s, next(span.end_s for span in spans if span.kind == "reduce"))


# -- two ranks ------------------------------------------------------------------------------------


def measure_sums(transport: Transport, pair: tuple[int, int]) -> list[Any] | None:
    """Return what was measured between the ranks `pair`, for `sums_of`; None on other ranks.

    Every rank calls it at the same time; those that are not of the pair wait.
    """
    found = None
    transport.connect([pair])
    transport.barrier()
    if transport.rank in pair:
        device = here() if transport.is_queued else Device("cpu")
        with _one_core_each(transport, pair):
            found = _TwoRanks(transport, pair, device).all_sizes()
    transport.barrier()
    return found


def sums_of(told: Sequence[Any]) -> tuple[SumBeside, ...]:
    """Return what `measure_sums` has told of."""
    rows: list[SumBeside] = []
    for size_bytes, ways, beside_s in told:
        compute, sum_, one_by_one, at_once = (Tenths(*each) for each in ways)
        rows.append(SumBeside(size_bytes, compute, sum_, one_by_one, at_once, beside_s))
    return tuple(rows)


@contextmanager
def _one_core_each(transport: Transport, pair: tuple[int, int]) -> Generator[None]:
    """Let the ranks of a pair that are on one host share two of its cores, else have one each."""
    if transport.is_queued or sys.platform != "linux":
        yield
        return
    own = os.sched_getaffinity(0)
    place = f"{os.uname().nodename} {os.readlink('/proc/self/ns/net')}"
    told = transport.all_gather_bytes(place.encode(), pair)
    cores = sorted(own)[: told.count(place.encode())]
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)


class _Repeated(NamedTuple):
    """The computes and the sums of one size, and the seconds of each way, round by round.

    times:  how many sums, which take `sums_s`.
    """

    size_bytes: int
    times: int
    sums_s: float
    computes: Callable[[], None]
    sums: Callable[[], None]
    rows: list[list[float]]


class _TwoRanks:
    """One of two ranks that do the same."""

    def __init__(self, transport: Transport, pair: tuple[int, int], device: Device) -> None:
        self._transport, self._pair, self._device = transport, pair, device
        self._lane, self._stream = Lane(), device.stream() if device.is_queued else None
        self._product_s = 0.0

    def all_sizes(self) -> list[Any]:
        """Return the rows of all sizes whose sum is not slow.

        Sizes take turns, as ways do: where everything gets slower for a while, all have.
        """
        self._product_s = self._least_s(partial(self._multiply, _PRODUCTS)) / _PRODUCTS
        works: list[_Repeated] = []
        for size in QUEUED_SIZES if self._device.is_queued else SIZES:
            call = self._sum_of(size)
            once_s = self._least_s(call)
            if once_s > _SLOW_S:
                break
            works.append(self._work(size, call, once_s))
        least, most = _ROUNDS
        round_s = sum((2 * _LONGER + 3) * work.sums_s for work in works) or 1.0
        for number in range(least + int(min(most - least, _BUDGET_S // round_s)) + 1):
            for work in works:
                self._round(work)
                if number == 0:  # the first one is not counted
                    work.rows.clear()
        self._lane.close()
        return [self._told(work) for work in works]

    def _sum_of(self, size: int) -> Callable[[], None]:
        """Return a call that sums so many bytes, each time others: no cache has them."""
        count = max(1, _SWEPT_BYTES // size)
        many = torch.zeros(count, size // 4, device=self._device.place)
        summed = itertools.cycle(many.unbind())

        def call() -> None:
            self._transport.all_reduce(next(summed), self._pair)

        for _ in range(count):
            call()  # the first one of each touches its memory
        return call

    def _least_s(self, call: Callable[[], object]) -> float:
        """Return the least seconds of some calls, of the slower rank; the first one is not counted.

        They only say how much to do, and what else runs makes them longer.
        """
        return max(1e-9, min([max(self._taken(call)) for _ in range(_TRIED + 1)][1:]))

    def _work(self, size: int, call: Callable[[], None], once_s: float) -> "_Repeated":
        times = max(1, math.ceil(_LEAST_S / once_s))
        count = max(1, round(_LONGER * times * once_s / self._product_s))
        calls = partial(self._multiply, count), partial(_repeat, call, times)
        return _Repeated(size, times, times * once_s, *calls, [])

    def _round(self, work: "_Repeated") -> None:
        """Do the work in all ways, and add their seconds; last those of computes beside the sum."""
        computes, sums, beside = work.computes, work.sums, list[float]()
        ways: tuple[Callable[[], object], ...] = (
            computes,
            sums,
            lambda: (computes(), sums()),
            lambda: self._at_once(computes, sums, beside),
        )
        taken = [max(self._taken(way)) for way in ways]
        work.rows.append([*taken, max(self._agreed(beside[0]))])

    def _told(self, work: "_Repeated") -> list[Any]:
        columns = [[s / work.times for s in column] for column in zip(*work.rows, strict=True)]
        *ways, beside = columns
        return [work.size_bytes, [_tenths(way) for way in ways], statistics.median(beside)]

    def _at_once(
        self, computes: Callable[[], None], sums: Callable[[], None], beside: list[float]
    ) -> None:
        """Begin the sums, compute, and wait for them; add the seconds of computing."""
        device, start = self._device, self._device.mark()
        if self._stream is None:
            begun: Begun | Queued = Begun(sums)
            self._lane.begin(begun)
        else:
            begun = Queued(sums, device, self._stream)
            begun.begin()
        computes()
        end = device.mark()
        begun.wait()
        beside.append(device.seconds_between(start, end))

    def _taken(self, call: Callable[[], object]) -> list[float]:
        """Return what `call` takes on both ranks, which begin it together."""
        self._agreed(0.0)
        start = self._device.mark()
        call()
        return self._agreed(self._device.seconds_between(start, self._device.mark()))

    def _agreed(self, number: float) -> list[float]:
        told = self._transport.all_gather_bytes(json.dumps(number).encode(), self._pair)
        return list(map(json.loads, told))

    def _multiply(self, count: int) -> None:
        width = _QUEUED_WIDTH if self._device.is_queued else _WIDTH
        a, product = torch.ones(2, width, width, device=self._device.place)
        for _ in range(count):
            torch.mm(a, a, out=product)


def _repeat(call: Callable[[], None], times: int) -> None:
    for _ in range(times):
        call()


def _tenths(seconds: Sequence[float]) -> Tenths:
    tenths = statistics.quantiles(seconds, n=10)
    low, high = max(tenths[0], min(seconds)), min(tenths[-1], max(seconds))
    return Tenths(statistics.median(seconds), low, high)
