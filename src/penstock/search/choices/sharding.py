"""Sharding: whether each bucket is kept whole on all ranks, or in parts that are gathered.

                 sent in forward   sent in backward         held                gathered at once
    replicate    -                 all-reduce G             W + G + O           -
    shard_keep   all-gather W      reduce-scatter G         W + (W + G + O)/n   G
    shard        all-gather W      both                     (W + G + O)/n       W + G

for a bucket with W bytes of weights, G of gradients and O of the optimizer on a ring of n ranks
(ring.py).  So replicate and shard_keep send 2 (n - 1) / n of a bucket, shard 3 (n - 1) / n.
What is sent in forward and in backward is hidden behind the bucket's `forward_s` and
`backward_s`; the rest makes the step longer, and the sum over all buckets is to be least, with

    sum of what is held + at_once * largest of what is gathered <= memory_bytes

In s slices, one after the other, a bucket gathers 1 / s at once, with s times the latency.

For a range of the largest gathered, a bound on the seconds is that of buckets which may gather
its upper end with the room that its lower end leaves.  The range with the lowest bound is halved
until it is one number; then what is left is a knapsack.  Exact to 1e-9, unless `bound_s` says
otherwise.  Deterministic.

Ignores:  that what shard_keep keeps is freed bucket by bucket in backward, so that the peak is an
          upper bound; several micro-batches a step, each of which gathers again; that an update
          of shards is shorter; the slower products of slices.
Source:   OSDP (arXiv:2209.13258): the choice and the slices.  ZeRO (arXiv:1910.02054): 2 and 3.
"""

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from penstock.errors import PlanError
from penstock.search.choices.knapsack import Floats, Ints, cheapest, relaxed, total
from penstock.search.choices.ring import Ring
from penstock.units import GiB, format_bytes, format_seconds

How = Literal["replicate", "shard_keep", "shard"]

_ENOUGH = 1e-9
_STATES = (200_000, 2_000_000)  # kept over all buckets when a range is looked into, and again


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent together, in whole bytes.

    forward_s, backward_s   seconds of computing beside which they are sent, in each pass
    Raises:   PlanError: a number below 0, or none.
    """

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value: float = getattr(self, name)
            if not 0 <= value < math.inf:
                raise PlanError(f"{name} of a bucket is {value}", hint="it must be 0 or more")


@dataclass(frozen=True, slots=True)
class Way:
    """A way to keep one bucket: seconds that stay exposed, bytes held, and gathered at once."""

    how: How
    slices: int
    seconds: float
    held_bytes: int
    gathered_bytes: int

    def __str__(self) -> str:
        """Return one line: "shard in 4 slices: 1.20 ms, holds 2.00 MiB, gathers 512 KiB"."""
        cut = f" in {self.slices} slices" if self.slices > 1 else ""
        gathers = f", gathers {format_bytes(self.gathered_bytes)}" if self.gathered_bytes else ""
        held = format_bytes(self.held_bytes)
        return f"{self.how}{cut}: {format_seconds(self.seconds)}, holds {held}{gathers}"


@dataclass(frozen=True, slots=True)
class Sharding:
    """A way for each bucket, with the reason, and what they give together.

    seconds      that stay exposed: the step is longer by them
    peak_bytes   held, and gathered at once; at most `memory_bytes`
    s_per_byte   seconds that a further byte of memory would save, buckets taken as divisible and
                 the largest gathered as it is; 0.0 where memory is not short
    bound_s      no choice has fewer seconds; below `seconds` only where too much was to be tried
    """

    ways: tuple[Way, ...]
    reasons: tuple[str, ...]
    seconds: float
    peak_bytes: int
    memory_bytes: int
    s_per_byte: float
    bound_s: float

    def __str__(self) -> str:
        """Return the whole in one line, then how many buckets go which way."""
        short = (
            f"memory is short: a further GiB saves up to {format_seconds(self.s_per_byte * GiB)}"
            if self.s_per_byte
            else "memory is not short"
        )
        used = f"{format_bytes(self.peak_bytes)} of {format_bytes(self.memory_bytes)}"
        counts = Counter((way.how, way.slices) for way in self.ways)
        lines = [f"{format_seconds(self.seconds)} exposed, {used}; {short}"]
        for (how, slices), count in counts.items():
            cut = f" in {slices} slices" if slices > 1 else ""
            lines.append(f"  {how}{cut}: {count} of {len(self.ways)} buckets")
        return "\n".join(lines)


def ways_of(bucket: Bucket, ring: Ring, *, slices: Sequence[int] = (1,)) -> tuple[Way, ...]:
    """Return every way to keep a bucket: whole first, then by slices."""
    weights, gradients = bucket.weight_bytes, bucket.gradient_bytes
    own = sum(-(-each // ring.count) for each in (weights, gradients, bucket.optimizer_bytes))
    whole = weights + gradients + bucket.optimizer_bytes
    spent = max(0.0, ring.all_reduce_s(gradients) - bucket.backward_s)
    ways = [Way("replicate", 1, spent, whole, 0)]
    for count in slices:
        gather_s = count * ring.all_gather_s(weights / count)
        scatter_s = count * ring.reduce_scatter_s(gradients / count)
        part = -(-gradients // count)
        once_s = max(0.0, ring.all_gather_s(weights) - bucket.forward_s)
        spent = once_s + max(0.0, scatter_s - bucket.backward_s)
        ways.append(Way("shard_keep", count, spent, weights + own, part))
        spent = max(0.0, gather_s - bucket.forward_s)
        spent += max(0.0, gather_s + scatter_s - bucket.backward_s)
        ways.append(Way("shard", count, spent, own, -(-weights // count) + part))
    return tuple(ways)


def best_sharding(
    buckets: Sequence[Bucket],
    ring: Ring,
    memory_bytes: int,
    *,
    slices: Sequence[int] = (1,),
    at_once: int = 1,
) -> Sharding:
    """Return the ways with the fewest exposed seconds that fit into `memory_bytes`.

    memory_bytes   of each rank, for weights, gradients and optimizer: less activations and all else
    slices         numbers of slices to choose from
    at_once        buckets gathered at any moment: 2 if one is gathered while another computes
    Raises:   PlanError: no ways fit; no bucket, no slices, or numbers below 1.
    """
    if not buckets or min((at_once, *slices), default=0) < 1 or not slices:
        what = f"{len(buckets)} buckets, slices {tuple(slices)}, {at_once} gathered at once"
        raise PlanError(what, hint="give one or more of each")
    every = [ways_of(bucket, ring, slices=slices) for bucket in buckets]
    table = _table(every, memory_bytes, at_once)
    choice, bound_s = _search(table)
    if choice is None:
        least = min(_least_bytes(table, largest) for largest in table.largest)
        raise PlanError(
            f"{len(buckets)} buckets need {format_bytes(least)} a rank on {ring.count} ranks; "
            f"there are {format_bytes(memory_bytes)}",
            hint="use more ranks, or more slices",
        )
    options: list[int] = choice.tolist()
    ways = tuple(every[row][option] for row, option in enumerate(options))
    seconds = math.fsum(way.seconds for way in ways)
    gathered = max(way.gathered_bytes for way in ways)
    held = sum(way.held_bytes for way in ways)
    eased = relaxed(*_between(table, gathered, gathered))
    assert eased is not None  # the choice itself fits
    reasons = tuple(_reason(way, others, gathered) for way, others in zip(ways, every, strict=True))
    return Sharding(
        ways, reasons, seconds, held + at_once * gathered, memory_bytes, eased.price,
        min(bound_s, seconds),
    )  # fmt: skip


def _reason(way: Way, options: Sequence[Way], gathered: int) -> str:
    """Return why a bucket goes this way: what a faster one would need."""
    fastest = min(options, key=lambda each: (each.seconds, each.held_bytes))
    if way.seconds <= fastest.seconds:
        return "nothing is faster"
    slower = f"{format_seconds(way.seconds - fastest.seconds)} slower than {fastest.how}"
    if fastest.gathered_bytes > gathered:
        more = format_bytes(fastest.gathered_bytes - gathered)
        return f"{slower}, which would gather {more} more at once than any bucket does"
    more = format_bytes(fastest.held_bytes - way.held_bytes)
    return f"{slower}, which would hold {more} more"


class _Table(NamedTuple):
    """All ways [bucket, way], what may be the largest gathered, and what there is."""

    seconds: Floats
    held: Ints
    gathered: Ints
    largest: Ints
    memory_bytes: int
    at_once: int


def _table(every: Sequence[Sequence[Way]], memory_bytes: int, at_once: int) -> _Table:
    seconds = np.array([[way.seconds for way in ways] for ways in every])
    held = np.array([[way.held_bytes for way in ways] for ways in every], np.int64)
    gathered = np.array([[way.gathered_bytes for way in ways] for ways in every], np.int64)
    return _Table(seconds, held, gathered, np.unique(gathered), memory_bytes, at_once)


def _between(table: _Table, low: int, high: int) -> tuple[Floats, Ints, int]:
    """Return the knapsack of ways that gather at most `high`, with the room that `low` leaves."""
    seconds = np.where(table.gathered <= high, table.seconds, np.inf)
    return seconds, table.held, table.memory_bytes - table.at_once * low


def _least_bytes(table: _Table, largest: int) -> int:
    held = np.where(table.gathered <= largest, table.held, np.iinfo(np.int64).max)
    return int(held.min(axis=1).sum()) + table.at_once * int(largest)


class _Range(NamedTuple):
    """What the largest gathered may be, by place; its bound; how often it was looked into."""

    bound: float
    low: int
    high: int
    looked: int


def _search(table: _Table) -> tuple[Ints | None, float]:
    """Return the best choice, and what no choice is below; None if nothing fits."""
    best, value, proved = None, math.inf, math.inf
    ranges = [_Range(0.0, 0, len(table.largest) - 1, 0)]
    while ranges and ranges[0].bound < value * (1 - _ENOUGH):
        low, high, looked = heapq.heappop(ranges)[1:]
        if low < high:
            choice, parts = _halves(table, low, high)
        else:
            ends = int(table.largest[low]), int(table.largest[high])
            problem = _between(table, *ends)
            most = _STATES[looked] // len(table.seconds)
            found = cheapest(*problem, below=value, most_states=most)
            choice, parts = found.choice, [_Range(found.bound, low, high, looked + 1)]
        if choice is not None and total(table.seconds, choice) < value:
            best, value = choice, total(table.seconds, choice)
        for part in parts:
            if part.looked == len(_STATES):
                proved = min(proved, part.bound)
            elif part.bound < value * (1 - _ENOUGH):
                heapq.heappush(ranges, part)
    return best, min(proved, value)


def _halves(table: _Table, low: int, high: int) -> tuple[Ints | None, list[_Range]]:
    """Return the halves of a range, and the better of the choices that their bounds come with."""
    middle = (low + high) // 2
    parts: list[_Range] = []
    fitting: list[Ints] = []
    for first, last in ((low, middle), (middle + 1, high)):
        eased = relaxed(*_between(table, int(table.largest[first]), int(table.largest[last])))
        if eased is not None:
            parts.append(_Range(eased.bound, first, last, 0))
            fitting += [eased.choice] if _fits(table, eased.choice) else []
    return min(fitting, key=lambda choice: total(table.seconds, choice), default=None), parts


def _fits(table: _Table, choice: Ints) -> bool:
    gathered = int(table.gathered[np.arange(len(choice)), choice].max())
    return total(table.held, choice) + table.at_once * gathered <= table.memory_bytes
