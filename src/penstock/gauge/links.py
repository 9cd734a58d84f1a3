"""Links: what a message costs between two ranks, and what computing beside messages costs.

Two ranks play ping-pong with payloads of several sizes.  A straight line through the medians gives
latency and bytes/s; what the computing threads lose is measured at both ends and taken off.  Then
both compute: alone, and while messages go both ways.  All other ranks wait meanwhile.

On devices that queue both ends queue several rounds at once, and marks on their streams tell what
these took: nothing of the host's is in it, and no end loses computing.
"""

import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.cluster.cluster import Link
from penstock.device import Device, here
from penstock.files import Json
from penstock.runtime.launch import run_processes
from penstock.runtime.worker import RankResult, Report
from penstock.transport.shared_memory import SharedMemoryTransport
from penstock.transport.transport import Send, TensorSpec, Transport, Wait
from penstock.units import KiB, MiB

SIZES = (64, 4 * KiB, 32 * KiB, 128 * KiB, 512 * KiB, 2 * MiB, 8 * MiB)
QUEUED_SIZES = (*SIZES, 32 * MiB, 128 * MiB)  # between devices that queue
PAYLOADS = (64, 512 * KiB)  # minimal and large: what pairs of hosts are compared by
QUEUED_PAYLOADS = (64, 32 * MiB)  # likewise, and pairs of devices of a host
_PROBED, _COMPARED = 0, 1 + len(QUEUED_SIZES)  # the first edges of either
EDGES = _COMPARED + 1 + len(PAYLOADS)  # that are used
_THINK_S = 500e-6  # an end computes before it sends: as in a run, the other one sleeps meanwhile,
_SWEPT_BYTES = 2 * MiB  # and finds in its cache what it has computed, not what it has to send
_PAUSE_S = 2e-3  # in which a message arrives that is not large
_ROUNDS = (7, 60)  # of each size: at least, at most
_BUDGET_S = 0.25  # for the rounds of one size beyond the least, and for an execution of an overlap
_SLOW_S = 0.25  # one way: larger payloads than that are left out
_STREAM = 3  # messages each way beside computes; the transport takes so many without waiting
_BESIDE = 0.8  # computes last this part of the messages beside them
_REPEATS = (5, 40)  # of each execution: at least, at most
_WIDTH, _QUEUED_WIDTH = 192, 2048  # of the matrices of a compute
_CHAIN = 5  # rounds that are queued at once
_PRODUCTS = 20  # of them are timed to know how many make a compute
_NOISE = 0.01  # a slowdown up to this is none


class Timing(NamedTuple):
    """Payloads of one size, one way: the first tenth, the median and the ninth tenth, in seconds.

    end_s:  of computing that each end loses, the mean of both.
    """

    size_bytes: int
    low_s: float
    median_s: float
    high_s: float
    end_s: float


class Overlapped(NamedTuple):
    """The same work done in all ways, in seconds: computes, and messages in both directions.

    compute_s, message_s  each alone
    beside_s              the computes while messages are under way
    both_s, sequential_s  all of it, computes beside the messages, and one after the other
    noise                 fraction by which two series of computes alone differ

    First tenths, so that what other programs do counts little.
    Source: arXiv:2507.03114 (the executions, and what slowdown is).
    """

    compute_s: float
    message_s: float
    beside_s: float
    both_s: float
    sequential_s: float
    noise: float

    @property
    def slowdown(self) -> float:
        """Return beside_s / compute_s - 1; 0.0 where that may be noise."""
        slower = self.beside_s / self.compute_s - 1
        return slower if slower > max(2 * self.noise, _NOISE) else 0.0


@dataclass(frozen=True, slots=True)
class Probe:
    """What was measured between two ranks; `link` is all of it in the figures of a cluster.

    has_wire:  False where the ends' copies are all that happens to a message: shared memory.  Then
               bytes_per_s is that of both copies, which a sum takes, and a message not again;
               nothing goes on beside computes, so what is seen there is noise.
    """

    timings: tuple[Timing, ...]
    overlap: Overlapped
    has_wire: bool = True

    @property
    def link(self) -> Link:
        link = fit(self.timings)
        if not self.has_wire:
            return replace(link, bytes_per_s=link.copy_bytes_per_s / 2)
        return replace(link, slowdown=self.overlap.slowdown)

    def to_json(self) -> dict[str, Json]:
        """Return all figures, those of the link first."""
        timings: list[Json] = [dict(timing._asdict()) for timing in self.timings]
        overlap: dict[str, Json] = {**self.overlap._asdict(), "slowdown": self.overlap.slowdown}
        return {"link": asdict(self.link), "timings": timings, "overlap": overlap}


def fit(timings: Sequence[Timing]) -> Link:
    """Return the link whose messages take what the first tenths of `timings` say.

    low_s = 2 end_s + latency_s + size_bytes / bytes_per_s
    end_s = overhead_s + size_bytes / copy_bytes_per_s

    A line each: it starts with what the smallest payload takes, and has the least sum of
    (what it is off)^2 / figure, between least squares and those of relative errors.
    Raises:   ValueError: payloads of one size only.
    """
    start_s, per_byte_s = _line([(timing.size_bytes, timing.low_s) for timing in timings])
    computed = any(timing.end_s for timing in timings)
    ends = [(timing.size_bytes, timing.end_s) for timing in timings]
    overhead_s, copied_s = _line(ends) if computed else (0.0, 0.0)
    wire_s = per_byte_s - 2 * copied_s
    return Link(
        latency_s=max(0.0, start_s - 2 * overhead_s),
        bytes_per_s=1 / wire_s if wire_s > 0 else math.inf,
        overhead_s=overhead_s,
        copy_bytes_per_s=1 / copied_s if copied_s > 0 else math.inf,
    )


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return a, b >= 0 of the line a + b * size: through the smallest, with least squares."""
    smallest, first_s = min(points)
    larger = [(size, max(seconds, 1e-12)) for size, seconds in points if size > smallest]
    others = [(size - smallest, seconds) for size, seconds in larger]
    if not others:
        raise ValueError(f"payloads of {smallest} bytes only; a line needs two sizes")
    up = sum(size * (seconds - first_s) / seconds for size, seconds in others)
    per_byte_s = max(0.0, up / sum(size**2 / seconds for size, seconds in others))
    return max(0.0, first_s - smallest * per_byte_s), per_byte_s


# -- two processes of this host -------------------------------------------------------------------


def measure_link() -> Link:
    """Return the link between two ranks that are processes of this host."""
    return probe_here().link


def probe_here() -> Probe:
    """Return what was measured between two processes of this host, in some seconds."""
    with tempfile.TemporaryFile() as told:
        run_processes(partial(_write_probe, told.fileno()), 2, lambda step: None)
        told.seek(0)
        return probe_of(json.loads(told.read()))


def _write_probe(told: int, transport: Transport, report: Report) -> RankResult:
    found = probe(transport, (0, 1))
    if transport.rank == 0:
        os.write(told, json.dumps(found).encode())
    return RankResult(transport.rank, (), (), 0, (), 0.0, {})


def probe_of(told: Sequence[Any]) -> Probe:
    """Return the probe that `probe` has told of."""
    timings, overlap, has_wire = told
    return Probe(tuple(Timing(*row) for row in timings), Overlapped(*overlap), has_wire)


# -- any two ranks --------------------------------------------------------------------------------


def probe(transport: Transport, pair: tuple[int, int]) -> list[Any] | None:
    """Return what was measured between the ranks `pair`, for `probe_of`; None on other ranks.

    Every rank calls it at the same time, once for a pair; those that are not of it wait.
    """
    found = None
    if transport.rank in pair:
        talk = _Talk(transport, pair, _PROBED)
        sizes = QUEUED_SIZES if transport.is_queued else SIZES
        ends = [talk.ends(size) for size in sizes]
        timings = _timings(talk, ends)
        has_wire = not isinstance(transport, SharedMemoryTransport)
        found = [timings, _overlap(talk, _widest(ends, timings)), has_wire]
    transport.barrier()
    return found


def payloads(transport: Transport) -> tuple[int, int]:
    """Return the sizes by which pairs of ranks are compared."""
    return QUEUED_PAYLOADS if transport.is_queued else PAYLOADS


def compare(transport: Transport, pair: tuple[int, int], first_edge: int = 0) -> list[float] | None:
    """Return the median seconds of `payloads` between `pair`, one way; None on other ranks.

    first_edge:  from which on `EDGES` of them are used by nobody else.
    Every rank calls it at the same time, once for a pair; those that are not of it wait.
    Source:   arXiv:2505.15536 (pairs of hosts by a minimal and a large payload).
    """
    found = None
    if transport.rank in pair:
        talk = _Talk(transport, pair, first_edge + _COMPARED)
        ends = [talk.ends(size) for size in payloads(transport)]
        found = [statistics.median(_trips(end, _ROUNDS[0])) for end in ends]
    transport.barrier()
    return found


class _Ends(NamedTuple):
    """This rank's ends of messages of one size, to and from the other one of a pair."""

    size_bytes: int
    is_first: bool
    send: Callable[[], None]
    post: Callable[[], None]
    wait: Callable[[], object]
    think: Callable[[], None]
    device: Device


class _Talk:
    """What the two ranks of a pair say to each other, in messages of its own edge."""

    def __init__(self, transport: Transport, pair: tuple[int, int], edge: int) -> None:
        self._transport, self._edge = transport, edge
        self.device = here() if transport.is_queued else Device("cpu")
        self.is_first = transport.rank == pair[0]
        self._peer = pair[1] if self.is_first else pair[0]
        specs = (TensorSpec((1 + _REPEATS[1],), torch.float64),)
        self._send, (_, self._wait) = self._bound(edge, specs)

    def _bound(self, edge: int, specs: tuple[TensorSpec, ...]) -> tuple[Send, tuple[Any, Wait]]:
        send = self._transport.bind_send(edge, self._peer, specs)
        return send, self._transport.bind_receive(edge, self._peer, specs)

    def ends(self, size_bytes: int) -> _Ends:
        """Return ends of messages of so many bytes, on the next edge."""
        self._edge += 1
        send, (post, wait) = self._bound(self._edge, (TensorSpec((size_bytes,), torch.uint8),))
        message = [torch.zeros(size_bytes, dtype=torch.uint8, device=self.device.place)]
        think = partial(_think, torch.zeros(_SWEPT_BYTES // 4))
        ways = partial(send, message), post or _nothing, wait
        return _Ends(size_bytes, self.is_first, *ways, think, self.device)

    def together(self, seconds: Sequence[float]) -> list[float]:
        """Return what both ranks have measured, the first rank's before; both meet."""
        told = torch.zeros(1 + _REPEATS[1], dtype=torch.float64)
        told[: 1 + len(seconds)] = torch.tensor([len(seconds), *seconds])
        self._send([told.to(self.device.place)])
        heard = list(map(float, self._wait()[0].cpu()))
        other = heard[1 : 1 + int(heard[0])]
        return [*seconds, *other] if self.is_first else [*other, *seconds]

    def agreed(self, number: float) -> float:
        """Return the first rank's number; both meet."""
        return self.together([number])[0]


def _nothing() -> None:
    """Post nothing: this transport needs no posting."""


def _timings(talk: _Talk, ends: Sequence[_Ends]) -> list[Timing]:
    """Return the timings of payloads of growing size, up to the first that is slow."""
    timings: list[Timing] = []
    for at, end in enumerate(ends):
        first_s = statistics.median(_trips(end, 2))
        rounds = int(talk.agreed(min(_ROUNDS[1], max(_ROUNDS[0], _BUDGET_S // (2 * first_s)))))
        trips = _trips(end, rounds)
        end_s = statistics.median(talk.together(_end_s(end)))
        low_s, median_s = talk.agreed(_low(trips)), talk.agreed(statistics.median(trips))
        timings.append(Timing(end.size_bytes, low_s, median_s, -_low([-s for s in trips]), end_s))
        if at and at + 1 < len(ends) and _next_s(timings, ends[at + 1].size_bytes) > _SLOW_S:
            break
    return timings


def _next_s(timings: Sequence[Timing], size_bytes: int) -> float:
    """Return what a larger payload would take, by the last two."""
    for before, last in pairwise(timings[-2:]):
        per_byte_s = (last.median_s - before.median_s) / (last.size_bytes - before.size_bytes)
        return last.median_s + per_byte_s * (size_bytes - last.size_bytes)
    return 0.0


def _trips(ends: _Ends, rounds: int) -> list[float]:
    """Return the seconds one way of each round: half of there and back, without the pauses."""
    if ends.device.is_queued:
        return _queued_trips(ends, rounds)
    trips: list[float] = []
    clock = time.perf_counter
    for _ in range(rounds + 1):  # the first touches memory
        if not ends.is_first:
            ends.wait()
        ends.think()
        start = clock()
        ends.send()
        if ends.is_first:
            ends.wait()
            trips.append(max(0.0, clock() - start - _THINK_S) / 2)
        else:
            trips.append(clock() - start)  # not used: the first rank's clock counts
    return trips[1:]


def _queued_trips(ends: _Ends, rounds: int) -> list[float]:
    """Return the same, each the mean of some that were queued at once; nobody waits in between."""
    trips: list[float] = []
    order = (ends.send, ends.wait) if ends.is_first else (ends.wait, ends.send)
    for _ in range(-(-rounds // _CHAIN) + 1):
        start = ends.device.mark()
        for _ in range(_CHAIN):
            for each in order:
                each()
        taken_s = ends.device.seconds_between(start, ends.device.mark())
        trips.append(taken_s / (2 * _CHAIN))
    return trips[1:]


def _low(seconds: Sequence[float]) -> float:
    return sorted(seconds)[len(seconds) // 10]


def _think(swept: Tensor) -> None:
    until = time.perf_counter() + _THINK_S
    swept.add_(1.0)
    while time.perf_counter() < until:
        pass


def _end_s(ends: _Ends) -> list[float]:
    """Return what one end costs the computing thread: half of a message sent and one received."""
    if ends.device.is_queued:
        return [0.0]
    times: list[float] = []
    clock = time.thread_time
    for _ in range(_REPEATS[0] + 1):
        ends.think()
        start = clock()
        ends.post()
        ends.send()
        sent = clock() - start
        time.sleep(_PAUSE_S)
        ends.think()
        start = clock()
        ends.wait()
        times.append((sent + clock() - start) / 2)
    return times[1:]


# -- computes beside messages ---------------------------------------------------------------------


def _widest(ends: Sequence[_Ends], timings: Sequence[Timing]) -> _Ends:
    """Return the largest payload of which a stream fits the budget."""
    fits = [t for t in timings if _STREAM * t.median_s <= _BUDGET_S]
    return ends[max(0, len(fits) - 1)]


def _overlap(talk: _Talk, ends: _Ends) -> Overlapped:
    """Run computes and messages in all ways in turn, on both ranks at the same time."""
    message_s = _low(_executed(talk, partial(_exchange, ends), 6)[1:])
    multiply = partial(_multiply, talk.device)
    product_s = _low(_executed(talk, partial(multiply, _PRODUCTS), 6)[1:]) / _PRODUCTS
    count = int(talk.agreed(max(1, _BESIDE * message_s // product_s)))
    whole_s = 3 * message_s + 4 * count * product_s
    repeats = int(talk.agreed(min(_REPEATS[1], max(_REPEATS[0], 4 * _BUDGET_S // whole_s))))
    computes, beside = partial(multiply, count), list[float]()
    ways = (
        computes,
        partial(_exchange, ends),
        partial(_exchange, ends, computes, beside),
        computes,
        lambda: (_exchange(ends), computes()),
    )
    rows = [[_executed(talk, way, 1)[0] for way in ways] for _ in range(repeats + 1)][1:]
    columns = [list(column) for column in zip(*rows, strict=True)]
    lows = [_low(talk.together(column)) for column in (*columns, beside[1:])]
    alone_s, message_s, both_s, again_s, sequential_s, beside_s = lows
    noise = abs(alone_s / again_s - 1)
    compute_s = (alone_s + again_s) / 2
    return Overlapped(compute_s, message_s, beside_s, both_s, sequential_s, noise)


def _executed(talk: _Talk, call: Callable[[], object], count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        talk.agreed(0)
        start = talk.device.mark()
        call()
        times.append(talk.device.seconds_between(start, talk.device.mark()))
    return times


def _exchange(
    ends: _Ends, beside: Callable[[], object] = _nothing, beside_s: list[float] | None = None
) -> None:
    """Send a stream and receive one, with a call in between; add its seconds to `beside_s`."""
    for _ in range(_STREAM):
        ends.post()
    for _ in range(_STREAM):
        ends.send()
    start = ends.device.mark()
    beside()
    end = ends.device.mark()
    for _ in range(_STREAM):
        ends.wait()
    if beside_s is not None:
        beside_s.append(ends.device.seconds_between(start, end))


def _multiply(device: Device, count: int) -> None:
    width = _QUEUED_WIDTH if device.is_queued else _WIDTH
    a, product = torch.ones(2, width, width, device=device.place)
    for _ in range(count):
        torch.mm(a, a, out=product)
