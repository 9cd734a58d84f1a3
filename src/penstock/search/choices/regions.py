"""Regions: which devices are near each other and alike, and their order along a pipeline.

Two payloads are timed between every two devices, a minimal and a large one; a message takes

    latency_s + size / bytes_per_s      bytes_per_s = (large - small bytes) / (large_s - small_s)

and two devices are as far apart as it takes on the slower of both ways.  Devices are merged, the
nearest first (single linkage).  Where the distance of two merges that follow each other jumps
most, regions end: two devices are in one region where a chain of near links joins them.  Inside
a region, devices whose seconds for the same work follow each other closely are of one kind.

Planted regions are found where the nearest across is farther than the farthest inside by
`isolated`, and by more than distances differ inside, or across.

Source:   DeepCEE, SpanTrain (arXiv:2505.15536): pairwise probes, two levels, cuts on slow links.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, linkage  # pyright: ignore  - scipy has no types

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.units import format_seconds

Floats: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = tuple[tuple[float, ...], ...]

_TINY_S = 1e-12  # a message is not taken to be faster
_MOST = 12  # regions in a pipeline


@dataclass(frozen=True, slots=True)
class Probes:
    """Seconds [from][to] of two payloads between every two devices; those to itself do not count.

    Raises:   PlanError: payloads of one size; seconds that are no square, below 0 or no number.
    """

    small_bytes: int
    large_bytes: int
    small_s: Rows
    large_s: Rows

    def __post_init__(self) -> None:
        if not 0 <= self.small_bytes < self.large_bytes:
            message = f"payloads of {self.small_bytes} and {self.large_bytes} bytes"
            raise PlanError(message, hint="give the minimal one and a larger one")
        count = len(self.small_s)
        for name, rows in (("small_s", self.small_s), ("large_s", self.large_s)):
            if not count or [len(row) for row in rows] != [count] * count:
                message = f"{name} has rows of {sorted({len(row) for row in rows})}, not {count}"
                raise PlanError(message, hint="give seconds from every device to every device")
            for a, row in enumerate(rows):
                for b, seconds in enumerate(row):
                    if not 0 <= seconds < math.inf:
                        where = f"{name} from {a} to {b} is {seconds}"
                        raise PlanError(where, hint="it must be 0 or more")

    def __len__(self) -> int:
        return len(self.small_s)

    def link(self, a: int, b: int) -> Link:
        """Return latency and bytes per second from `a` to `b`; inf where both took as long."""
        small_s, large_s = self.small_s[a][b], self.large_s[a][b]
        s_per_byte = max(0.0, large_s - small_s) / (self.large_bytes - self.small_bytes)
        latency_s = max(0.0, min(small_s, large_s) - self.small_bytes * s_per_byte)
        return Link(latency_s, 1 / s_per_byte if s_per_byte else math.inf)

    def distance_s(self, size_bytes: float) -> Floats:
        """Return the seconds [a, b] of such a message, the slower way."""
        count = len(self)
        seconds = np.zeros((count, count))
        for a in range(count):
            for b in range(count):
                if a != b:
                    link = self.link(a, b)
                    seconds[a, b] = link.latency_s + size_bytes / link.bytes_per_s
        return np.maximum(seconds, seconds.T)


@dataclass(frozen=True, slots=True)
class Regions:
    """For every device its region, numbered as they come, and its kind in it, the fastest 0."""

    region: tuple[int, ...]
    kind: tuple[int, ...]

    @property
    def count(self) -> int:
        return max(self.region) + 1

    def members(self, region: int) -> tuple[int, ...]:
        """Return the devices of a region."""
        return tuple(at for at, found in enumerate(self.region) if found == region)

    def __str__(self) -> str:
        """Return a line for each region: its devices, kind by kind."""
        lines: list[str] = []
        for region in range(self.count):
            here = self.members(region)
            kinds = sorted({self.kind[at] for at in here})
            alike = (" ".join(str(at) for at in here if self.kind[at] == kind) for kind in kinds)
            lines.append(f"region {region}: {' | '.join(alike)}")
        return "\n".join(lines)


def regions(
    probes: Probes,
    compute_s: Sequence[float],
    *,
    message_bytes: float | None = None,
    isolated: float = 3.0,
    alike: float = 1.2,
) -> Regions:
    """Return the regions, and kinds of devices inside each.

    compute_s       of every device for the same work
    message_bytes   whose seconds are the distance; default: the large payload
    isolated        how many times farther the next merge must be to end the regions; where none
                    is, all devices are one region
    alike           how many times slower the next device of a kind may be
    Raises:   PlanError: seconds of other devices, or not above 0.
    """
    if len(compute_s) != len(probes) or not all(0 < each < math.inf for each in compute_s):
        message = f"compute_s of {len(compute_s)} devices, probes of {len(probes)}"
        raise PlanError(message, hint="give seconds above 0 for every device")
    if not min(isolated, alike) >= 1:
        message = f"isolated is {isolated}, alike {alike}"
        raise PlanError(message, hint="both are factors of 1 or more")
    size = probes.large_bytes if message_bytes is None else message_bytes
    far = np.log(np.maximum(probes.distance_s(size) / _TINY_S, 1.0))
    region = _merged(far, math.log(isolated))
    kind = [0] * len(region)
    for number in set(region):
        here = [at for at, found in enumerate(region) if found == number]
        here.sort(key=lambda at: compute_s[at])
        for before, at in itertools.pairwise(here):
            slower = compute_s[at] > alike * compute_s[before]
            kind[at] = kind[before] + slower
    return Regions(region, tuple(kind))


def _merged(distance: Floats, least_jump: float) -> tuple[int, ...]:
    """Return the region of each device: merges end before the greatest jump of the distance."""
    count = len(distance)
    if count < 3:
        return (0,) * count
    merges = cast("Floats", linkage(distance[np.triu_indices(count, 1)], "single"))
    heights = merges[:, 2]
    jumps = np.diff(heights)
    at = int(jumps.argmax())
    if jumps[at] < least_jump:
        return (0,) * count
    labels: list[int] = fcluster(merges, heights[at] + jumps[at] / 2, "distance").tolist()
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


@dataclass(frozen=True, slots=True)
class Order:
    """Devices along a pipeline; `slow_links` places after which a region ends; their seconds."""

    devices: tuple[int, ...]
    slow_links: tuple[int, ...]
    slow_s: float

    def __str__(self) -> str:
        """Return devices with " || " where a region ends."""
        text = ""
        for at, device in enumerate(self.devices):
            text += f"{device}{' || ' if at in self.slow_links else ' '}"
        count = len(self.slow_links)
        slow = f"{count} slow link{'' if count == 1 else 's'}"
        return f"{text.strip()}: {slow}, {format_seconds(self.slow_s)} a message"


def pipeline_order(probes: Probes, found: Regions, *, message_bytes: float | None = None) -> Order:
    """Return the order with fewest links between regions, and of those the least seconds on them.

    Regions stand whole one after the other; which first, and by which devices they are entered
    and left, is tried for all sets of regions (Held and Karp): O(2^regions * devices^2).  Between
    these two, devices of a kind stand together.

    Ignores:  links inside a region.
    Raises:   PlanError: regions of other devices, or more than 12.
    """
    if len(found.region) != len(probes) or found.count > _MOST:
        message = f"{found.count} regions of {len(found.region)} devices, probes of {len(probes)}"
        raise PlanError(message, hint=f"at most {_MOST} regions, of the devices that were probed")
    size = probes.large_bytes if message_bytes is None else message_bytes
    doors, slow_s = _doors(probes.distance_s(size), found)
    devices: list[int] = []
    ends: list[int] = []
    for entry, leave in doors:
        devices += _inside(found, entry, leave)
        ends.append(len(devices) - 1)
    return Order(tuple(devices), tuple(ends[:-1]), slow_s)


def _inside(found: Regions, entry: int, leave: int) -> list[int]:
    """Return the devices of a region from its entry on, kind by kind, to where it is left."""
    if entry == leave:
        return [entry]
    kinds = found.kind

    def place(at: int) -> tuple[int, bool, int, int]:
        side = 0 if kinds[at] == kinds[entry] else 2 if kinds[at] == kinds[leave] else 1
        return (3 if at == leave else side, at != entry, kinds[at], at)

    return sorted(found.members(found.region[entry]), key=place)


def _doors(distance: Floats, found: Regions) -> tuple[list[tuple[int, int]], float]:
    """Return by which device each region is entered and left, in order, and the seconds between.

    cost[set of regions, device]: the least seconds to have gone through them and leave by it
    """
    members = [np.array(found.members(region)) for region in range(found.count)]
    everything = (1 << found.count) - 1
    cost = np.full((everything + 1, len(distance)), np.inf)
    came = np.full((everything + 1, len(distance), 2), -1)  # from which device, to which
    for region, here in enumerate(members):
        cost[1 << region, here] = 0.0
        came[1 << region, here, 1] = np.roll(here, 1)  # any other
    for done in range(1, everything):
        for region, here in enumerate(members):
            if done >> region & 1:
                continue
            through = cost[done][:, None] + distance[:, here]
            arrive = through.min(axis=0)
            for leave in here:
                among = np.flatnonzero((here != leave) | (len(here) == 1))
                at = among[arrive[among].argmin()]
                cost[done | 1 << region, leave] = arrive[at]
                came[done | 1 << region, leave] = through[:, at].argmin(), here[at]
    doors: list[tuple[int, int]] = []
    leave, done = int(cost[everything].argmin()), everything
    total_s = float(cost[everything, leave])
    while done:
        before, entry = map(int, came[done, leave])
        doors.append((entry, leave))
        done &= ~(1 << found.region[leave])
        leave = before
    return doors[::-1], total_s
