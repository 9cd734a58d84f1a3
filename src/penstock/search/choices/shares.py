"""Shares: how many samples of the batch, and how much of the state, each of unlike devices takes.

Weights are sharded over all devices, gathered for forward and for backward, and the gradients
scattered.  With b_i samples and a part p_i of the state on device i, sums of B and 1,

    step = max of seconds_i(b_i) + (2 all-gathers of W + a reduce-scatter of G by the largest p_i)
    fixed_bytes_i + sample_bytes_i * b_i + state_bytes * p_i <= memory_bytes_i

The largest part counts because a ring waits for it (ring.py).  The gradient of the batch is
the mean over its samples, so of the mean of each device it takes b_i / B.

With a limit on the computing, b_i is limited by seconds and memory, and the sum of
min(p, room of i after b_i) with a limit p on the parts is concave in every b_i: giving sample
after sample to the device that loses least room is best.  So the least largest part is found by
bisection, ended by the parts that the samples found allow.  It can only grow as the limit falls;
between two limits the step is not below the lower one and the part of the upper one, and what
promises less than the best is cut in two.  Exact to 1e-12, parts as real numbers.  Deterministic.

Ignores:  computing beside the gathers; parts rounded to whole elements; what is gathered at any
          moment, which belongs to `fixed_bytes`.
Source:   Cephalo (arXiv:2411.01075): batch and state apart from each other.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.errors import PlanError
from penstock.search.choices.ring import Ring
from penstock.units import format_bytes, format_seconds

_ENOUGH = 1e-12
_NEAR = 1e-9  # to the whole, of given parts


@dataclass(frozen=True, slots=True)
class Worker:
    """One device: what it takes and holds for its samples.

    batch_s       [k]: seconds of forward and backward of k samples, from 0 on; never falling
    sample_bytes  kept of each of its samples.  Where it takes them in micro-batches, layer by
                  layer, that is what a layer hands on, and `fixed_bytes` has the inside of one
    Raises:   PlanError: seconds or bytes below 0 or that fall, or no number.
    """

    name: str
    batch_s: tuple[float, ...]
    memory_bytes: float
    sample_bytes: float = 0.0
    fixed_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "sample_bytes", "fixed_bytes"):
            if not 0 <= getattr(self, name) < math.inf:
                message = f'{name} of "{self.name}" is {getattr(self, name)}'
                raise PlanError(message, hint="it must be 0 or more")
        pairs = zip((0.0, *self.batch_s), self.batch_s, strict=False)
        if not self.batch_s or not all(a <= b < math.inf for a, b in pairs):
            message = f'batch_s of "{self.name}" is not a row of seconds that never falls'
            raise PlanError(message, hint="give the seconds of 0, 1, 2, ... samples")


def affine_s(batch: int, call_s: float, sample_s: float) -> tuple[float, ...]:
    """Return the seconds of 0 .. `batch` samples: call_s + samples * sample_s, and 0 of none."""
    return (0.0, *(call_s + count * sample_s for count in range(1, batch + 1)))


@dataclass(frozen=True, slots=True)
class Load:
    """What is shared: samples, the bytes gathered, scattered and kept over all devices.

    state_bytes   of weights, gradients and optimizer together, each element once
    """

    batch: int
    weight_bytes: float
    gradient_bytes: float
    state_bytes: float

    def __post_init__(self) -> None:
        sizes = (self.weight_bytes, self.gradient_bytes, self.state_bytes)
        if self.batch < 1 or not all(0 <= each < math.inf for each in sizes):
            raise PlanError(f"a batch of {self.batch}, bytes {sizes}", hint="none is below 0")


@dataclass(frozen=True, slots=True)
class Shares:
    """Samples and part of the state of every device, and the step that they give.

    weights   of the devices' mean gradients in that of the batch: samples / batch
    """

    names: tuple[str, ...]
    samples: tuple[int, ...]
    parts: tuple[float, ...]
    compute_s: float
    gather_s: float
    peak_bytes: tuple[float, ...]

    @property
    def step_s(self) -> float:
        return self.compute_s + self.gather_s

    @property
    def weights(self) -> tuple[float, ...]:
        return tuple(count / sum(self.samples) for count in self.samples)

    def __str__(self) -> str:
        """Return the step, then a line for each device."""
        parts = f"{format_seconds(self.compute_s)} + {format_seconds(self.gather_s)} of gathering"
        lines = [f"{format_seconds(self.step_s)} per step: {parts}"]
        for row in zip(self.names, self.samples, self.parts, self.peak_bytes, strict=True):
            name, count, part, peak = row
            held = f"{100 * part:.3g} % of the state, {format_bytes(peak)}"
            lines.append(f"  {name}: {count} sample{'' if count == 1 else 's'}, {held}")
        return "\n".join(lines)


def best_shares(workers: Sequence[Worker], load: Load, ring: Ring) -> Shares:
    """Return the shares with the shortest step; the even split where none is shorter.

    ring      its `count` is that of the workers
    Raises:   PlanError: nothing fits the memory; a ring of others; too few seconds are known.
    """
    if ring.count != len(workers):
        message = f"{len(workers)} workers on a ring of {ring.count}"
        raise PlanError(message, hint="give the ring over all of them")
    problem = _Problem(workers, load, ring)
    limits = sorted({seconds for each in workers for seconds in each.batch_s[: load.batch + 1]})
    best = _searched(problem, limits)
    if best is None:
        raise PlanError(_too_large(problem), hint="use more devices, or a smaller batch")
    even = even_shares(workers, load, ring)
    return even if even is not None and even.step_s <= best.step_s * (1 + _ENOUGH) else best


def shares_of(
    workers: Sequence[Worker],
    load: Load,
    ring: Ring,
    *,
    samples: Sequence[int],
    parts: Sequence[float],
) -> Shares | None:
    """Return what given shares give; None where they do not fit the memory.

    Raises:   PlanError: not all samples, not the whole state, more samples than have seconds.
    """
    rows = list(zip(workers, samples, strict=True))
    known = all(0 <= count < len(each.batch_s) for each, count in rows)
    if not known or sum(samples) != load.batch or abs(sum(parts) - 1) > _NEAR:
        message = f"{list(samples)} samples of {load.batch}, {sum(parts):.6g} of the state"
        raise PlanError(message, hint="share all of both, as far as seconds are known")
    made = _made(_Problem(workers, load, ring), samples, parts)
    fits = all(
        peak <= each.memory_bytes * (1 + _ENOUGH)
        for each, peak in zip(workers, made.peak_bytes, strict=True)
    )
    return made if fits else None


def even_shares(workers: Sequence[Worker], load: Load, ring: Ring) -> Shares | None:
    """Return equal shares, the first workers one sample more; None where they do not fit."""
    count = len(workers)
    samples = [load.batch // count + (at < load.batch % count) for at in range(count)]
    if any(n >= len(each.batch_s) for n, each in zip(samples, workers, strict=True)):
        return None
    return shares_of(workers, load, ring, samples=samples, parts=[1 / count] * count)


class _Problem(NamedTuple):
    workers: Sequence[Worker]
    load: Load
    ring: Ring

    def gather_s(self, part: float) -> float:
        """Return the seconds of two all-gathers and a reduce-scatter by the largest part."""
        gather = self.ring.all_gather_s(self.load.weight_bytes, largest=part)
        return 2 * gather + self.ring.reduce_scatter_s(self.load.gradient_bytes, largest=part)


def _room(worker: Worker, count: int, state_bytes: float) -> float:
    """Return the part of the state that fits beside so many samples; below 0: they do not fit."""
    left = worker.memory_bytes - worker.fixed_bytes - count * worker.sample_bytes
    if left < 0:
        return -1.0
    return left / state_bytes if state_bytes else math.inf


def _rooms(problem: _Problem, samples: Sequence[int]) -> list[float]:
    state_bytes = problem.load.state_bytes
    pairs = zip(problem.workers, samples, strict=True)
    return [_room(worker, count, state_bytes) for worker, count in pairs]


def _searched(problem: _Problem, limits: Sequence[float]) -> Shares | None:
    """Return the best shares over all limits on the computing, by branch and bound."""
    widest = _least_part(problem, limits[-1])
    if widest is None:
        return None
    best = _made(problem, *widest)
    ranges = [(limits[0] + best.gather_s, 0, len(limits) - 1, best.gather_s)]
    while ranges and ranges[0][0] < best.step_s * (1 - _ENOUGH):
        _, low, high, gather_s = heapq.heappop(ranges)
        middle = (low + high) // 2
        if low < high:
            heapq.heappush(ranges, (limits[middle + 1] + gather_s, middle + 1, high, gather_s))
        found = _least_part(problem, limits[middle])
        if found is None:
            continue
        made = _made(problem, *found)
        best = min(best, made, key=lambda each: each.step_s)
        if low < middle:
            bound = limits[low] + made.gather_s
            heapq.heappush(ranges, (bound, low, middle - 1, made.gather_s))
    return best


def _least_part(problem: _Problem, limit_s: float) -> tuple[list[int], list[float]] | None:
    """Return samples and parts with the least largest part, no device slower than `limit_s`."""
    most = [_most(each, limit_s, problem.load.batch) for each in problem.workers]
    high = 1.0
    samples = _roomiest(problem, most, high)
    if samples is None or _total(problem, samples, high) < 1 - _ENOUGH:
        return None
    low = 1 / len(most) * (1 - _ENOUGH)
    high = _level(_rooms(problem, samples))
    while high - low > _ENOUGH * high:
        middle = (low + high) / 2
        found = _roomiest(problem, most, middle)
        if found is None or _total(problem, found, middle) < 1:
            low = middle
        else:
            samples, high = found, _level(_rooms(problem, found))
    return samples, [min(high, room) for room in _rooms(problem, samples)]


def _most(worker: Worker, limit_s: float, batch: int) -> int:
    """Return how many samples fit the memory and take no longer than `limit_s`."""
    most = min(bisect_right(worker.batch_s, limit_s) - 1, batch)
    while most > 0 and _room(worker, most, 0.0) < 0:
        left = worker.memory_bytes - worker.fixed_bytes
        most = min(most - 1, math.floor(max(left, 0.0) / worker.sample_bytes))
    return most


def _roomiest(problem: _Problem, most: Sequence[int], part: float) -> list[int] | None:
    """Return the samples that leave most room for the state, of which a device takes `part`.

    The samples that cost no room come first, then one that costs some, then those that cost all
    their bytes; the cheapest of each device first.  None: the samples are too many.
    """
    state_bytes, left = problem.load.state_bytes, problem.load.batch
    samples = [0] * len(most)
    costs: list[tuple[float, int, int]] = []  # room that a sample costs, whose, how many
    for at, (worker, limit) in enumerate(zip(problem.workers, most, strict=True)):
        if _room(worker, 0, state_bytes) < 0 or limit < 0:
            return None
        free = _free(worker, limit, part, state_bytes)
        samples[at] = min(free, left)
        left -= samples[at]
        if free < limit:
            before = min(part, _room(worker, free, state_bytes))
            costs.append((before - _room(worker, free + 1, state_bytes), at, 1))
            costs.append((worker.sample_bytes / state_bytes, at, limit - free - 1))
    for _, at, count in sorted(costs):
        taken = min(count, left)
        samples[at] += taken
        left -= taken
    return samples if not left else None


def _free(worker: Worker, limit: int, part: float, state_bytes: float) -> int:
    """Return the samples beside which `part` of the state still has room."""
    low, high = 0, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        if _room(worker, middle, state_bytes) >= part:
            low = middle
        else:
            high = middle
    return low


def _total(problem: _Problem, samples: Sequence[int], part: float) -> float:
    return math.fsum(min(part, room) for room in _rooms(problem, samples))


def _level(rooms: Sequence[float]) -> float:
    """Return the least p for which the sum of min(p, room) is 1."""
    left = 1.0
    for at, room in enumerate(sorted(rooms)):
        level = left / (len(rooms) - at)
        if level <= room:
            return level
        left -= room
    return max(rooms)  # together 1, but for rounding


def _made(problem: _Problem, samples: Sequence[int], parts: Sequence[float]) -> Shares:
    workers, load = problem.workers, problem.load
    taken = list(zip(workers, samples, parts, strict=True))
    peaks = (
        each.fixed_bytes + count * each.sample_bytes + part * load.state_bytes
        for each, count, part in taken
    )
    return Shares(
        tuple(each.name for each in workers),
        tuple(samples),
        tuple(parts),
        max(each.batch_s[count] for each, count, _ in taken),
        problem.gather_s(max(parts)),
        tuple(peaks),
    )


def _too_large(problem: _Problem) -> str:
    memory = sum(each.memory_bytes for each in problem.workers)
    what = f"a batch of {problem.load.batch} and {format_bytes(problem.load.state_bytes)} of state"
    where = f"{len(problem.workers)} devices with {format_bytes(memory)} in all"
    return f"{what} do not fit {where}"
