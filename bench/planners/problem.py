"""Problem: a chain of layers, any devices with any links, a batch; and an assignment of layers.

An assignment cuts the layers into stages, puts the stages on groups of devices and names the
schedule.  Rank r of the schedule is group r; a micro-batch is shared out equally over a group.

    F, I, W    a third each of the seconds of the group's slowest device / its size
    message    the contiguous shares of senders and receivers: where two overlap a part is sent; a
               device sends, and receives, one part after the other; a gradient takes as long
    sum        once a step, after the last backward: a ring over the group,
               2 * (r - 1) / r * weight bytes / its slowest link
    memory     states of the stages of a group once on each device, and of the activations in
               flight each device's share

Ignores:  latency, two messages that share a link, micro-batches too small to keep a device busy.
"""

import math
from dataclasses import dataclass

import numpy as np

from bench.planners.line_kernel import Arrays
from penstock.errors import PlanError
from penstock.search.transformer.partition import Chain, Kind

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be planned.  Devices are numbered kind by kind.

    bytes_per_s   [device][device], of a message; the slower direction counts for both
    hosts         of every device; default: all in one
    Raises:   PlanError: sizes that differ, a link or micro-batches not above 0.
    """

    chain: Chain
    kinds: tuple[Kind, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    num_micro_batches: int
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        count = self.num_devices
        if not self.hosts:
            object.__setattr__(self, "hosts", (0,) * count)
        rows = [len(row) for row in self.bytes_per_s]
        if not count or rows != [count] * count or len(self.hosts) != count:
            what = f"{count} devices, links of {rows}, hosts of {len(self.hosts)}"
            raise PlanError(what, hint="give a link for every pair of devices, and every host")
        if any(len(kind.layer_s) != len(self.chain) for kind in self.kinds):
            lengths = [len(kind.layer_s) for kind in self.kinds]
            message = f"kinds have seconds of {lengths} layers, the chain has {len(self.chain)}"
            raise PlanError(message, hint="give seconds for every layer")
        for a, row in enumerate(self.bytes_per_s):
            for b, link in enumerate(row):
                if a != b and not link > 0:
                    message = f"the link from device {a} to {b} has {link} bytes/s"
                    raise PlanError(message, hint="it must be above 0")
        if self.num_micro_batches < 1:
            message = f"{self.num_micro_batches} micro-batches make no step"
            raise PlanError(message, hint="give 1 or more")

    @property
    def num_devices(self) -> int:
        return sum(kind.count for kind in self.kinds)

    @property
    def kind_of(self) -> tuple[int, ...]:
        """The kind of every device."""
        return tuple(at for at, kind in enumerate(self.kinds) for _ in range(kind.count))

    def arrays(self) -> Arrays:
        """Return the arguments of the kernels."""
        links = np.array(self.bytes_per_s, np.float64)
        np.fill_diagonal(links, math.inf)
        sent = np.array(self.chain.sent_bytes, np.float64)
        sent[-1] = 0.0
        chain, kind_of = self.chain, np.array(self.kind_of, np.int64)
        sizes = (chain.weight_bytes, chain.state_bytes, chain.kept_bytes)
        before = np.zeros((len(sizes) + len(self.kinds), len(chain) + 1))
        seconds = [kind.layer_s for kind in self.kinds]
        np.cumsum(np.array([*sizes, *seconds]), axis=1, out=before[:, 1:])
        memory = np.array([kind.memory_bytes for kind in self.kinds], np.float64)[kind_of]
        return Arrays(
            before[3:], before[0], before[1], before[2], sent,
            kind_of, 1.0 / np.minimum(links, links.T), memory,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assignment:
    """Stages that end before the layers `ends`, on `groups` of devices, in an order by name.

    Raises:   PlanError: no layer in a stage, no device in a group, a device that is in two.
    """

    ends: tuple[int, ...]
    groups: Groups
    schedule: str = "one_f_one_b"

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(tuple(sorted(group)) for group in self.groups))
        devices = [device for group in self.groups for device in group]
        if not all(self.groups) or len(set(devices)) < len(devices):
            hint = "a group has devices, and none is in two"
            raise PlanError(f"groups of devices are {self.groups}", hint=hint)
        if not self.ends or list(self.ends) != sorted({*self.ends} - {0}):
            message = f"stages end before layers {self.ends}"
            raise PlanError(message, hint="every stage has a layer")

    def __str__(self) -> str:
        """Return one line: "one_f_one_b  0-3 on 0,1 | 4-5 on 2"."""
        firsts = (0, *self.ends[:-1])
        spans = [f"{first}-{end - 1}" for first, end in zip(firsts, self.ends, strict=True)]
        places = [",".join(map(str, group)) for group in self.groups]
        if len(spans) == len(places):
            both = zip(spans, places, strict=True)
            return f"{self.schedule}  " + " | ".join(f"{a} on {b}" for a, b in both)
        return f"{self.schedule}  {' | '.join(spans)} on ranks {' | '.join(places)}"


def slowest_links(problem: Problem) -> tuple[tuple[float, ...], ...]:
    """Return the bytes per second of the slowest link between devices of two kinds, [kind][kind].

    Endless for a kind of which there is one device.
    """
    links, kind_of = np.array(problem.bytes_per_s, np.float64), np.array(problem.kind_of)
    links = np.minimum(links, links.T)
    np.fill_diagonal(links, math.inf)
    kinds = range(len(problem.kinds))
    return tuple(
        tuple(float(links[np.ix_(kind_of == a, kind_of == b)].min()) for b in kinds) for a in kinds
    )
