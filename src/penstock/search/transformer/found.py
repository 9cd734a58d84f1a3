"""Found: pools of devices, and the configurations on them that a search found."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import PlanError
from penstock.estimate.datasheet import Datasheet
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work_terms import Floats
from penstock.units import format_bytes


@dataclass(frozen=True, slots=True)
class Pool:
    """A number of like devices in one place, their memory, and what one of them costs."""

    device: Datasheet
    count: int
    memory_bytes: float
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1 or not self.memory_bytes > 0 or not self.usd_per_hour >= 0:
            what = f"{self.count} devices of {self.memory_bytes} bytes"
            message = f"a pool of {what} at {self.usd_per_hour} usd/hour"
            raise PlanError(message, hint="count and memory are above 0, the price is not below")


class Pools(NamedTuple):
    """A pool for every kind of device, each in a zone of its own.

    between_bytes_per_s:  of the link between two zones, which all replicas share.
    """

    pools: Sequence[Pool]
    between_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Configuration:
    """A run, its schedule, and what is predicted: seconds and dollars of a step, peak bytes."""

    run: TrainingRun
    schedule: str
    seconds: float
    peak_bytes: float
    usd: float

    def __str__(self) -> str:
        """Return one line of degrees, then the figures."""
        run = self.run
        pipe = " + ".join(
            f"{len(tuple(alike))} {name}"
            for name, alike in itertools.groupby(device.name for device in run.devices)
        )
        chunks = f" x {run.interleave} chunks" if run.interleave > 1 else ""
        parallel = ", sequence parallel" if run.sequence_parallel else ""
        return (
            f"tensor {run.tensor} pipe {pipe}{chunks} data {run.data}, "
            f"{run.num_micro_batches} micro-batches of {run.micro_batch}, {self.schedule}, "
            f"recompute {run.recompute}, sharding {run.sharding}{parallel}: "
            f"{self.seconds:.3f} s, {format_bytes(self.peak_bytes)}, {self.usd:.4f} usd"
        )


@dataclass(frozen=True, slots=True)
class Configurations:
    """What a search found.

    front      no other that was simulated is better in one of seconds, bytes, dollars and as
               good in the others; the fastest first
    simulated  all that were, the fastest first
    rejected   reasons, each with how many candidates
    """

    best: Configuration
    front: tuple[Configuration, ...]
    simulated: tuple[Configuration, ...]
    candidates: int
    rejected: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        """Return the best, and why the others are not it."""
        lines = [str(self.best), f"of {self.candidates:,} candidates"]
        return "\n".join([*lines, *(f"  {count:,} {reason}" for reason, count in self.rejected)])


def cost_of(run: TrainingRun, pools: Sequence[Pool], seconds: float) -> float:
    """Return the dollars that the devices of all stages cost for so long."""
    price = {pool.device.name: pool.usd_per_hour for pool in pools}
    usd_per_hour = sum(price[device.name] for device in run.devices) * run.ranks / run.pipe
    return usd_per_hour / 3600 * seconds


def pareto(values: Floats) -> NDArray[np.int64]:
    """Return the rows of which no other is as small everywhere; of equal ones the first."""
    order = np.lexsort(values.T[::-1])
    kept: list[int] = []
    for at in map(int, order):
        others = values[kept]
        if not kept or not (others <= values[at]).all(axis=1).any():
            kept.append(at)
    return np.array(kept, np.int64)


def front_of(made: Sequence[Configuration]) -> tuple[Configuration, ...]:
    """Return the configurations on the Pareto front of seconds, bytes and dollars."""
    rows = np.array([[each.seconds, each.peak_bytes, each.usd] for each in made])
    return tuple(made[int(at)] for at in pareto(rows))
