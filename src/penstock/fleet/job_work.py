"""Work: what a job needs of machines: speed by their number, starts, changes and checkpoints.

The record can be read from a TOML file that a user or a run wrote (docs/fleet.md).
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from penstock.errors import FleetError
from penstock.files import read_bytes
from penstock.fleet.one_future import MOST_HELD, Floats
from penstock.typed import MisfitError, damage, typed

_HINT = "docs/fleet.md has the fields of a job"
_MOST_S = 1e10  # three centuries: what takes longer is a number mistyped


@dataclass(frozen=True, slots=True)
class Speed:
    """Steps per second on so many machines, and the plan that gives it."""

    machines: int
    steps_per_s: float
    plan: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.machines <= MOST_HELD:
            message = f"a speed on {self.machines} machines"
            raise FleetError(message, hint=f"give 1 to {MOST_HELD} machines")
        if not 1 / _MOST_S <= self.steps_per_s <= _MOST_S:
            message = f"{self.steps_per_s:g} steps/s on {self.machines} machines"
            raise FleetError(message, hint=f"give {1 / _MOST_S:g} to {_MOST_S:g} steps/s")


@dataclass(frozen=True, slots=True)
class FleetJob:
    """A training run as the fleet sees it.

    steps          to do
    speeds         for each number of machines that there is a plan for; in between, the next lower
    start_s        from the order of a machine until it is useful: provisioning and the cold start
    reform_s       for which all pause when machines join or leave: the elastic runtime's own figure
    restart_s      for which all pause when the state is read from a checkpoint: a warm start
    checkpoint_s   for which all pause to write a checkpoint
    every_s        between checkpoints; None: by Young and Daly, from how long machines last
    notice_s       that the cloud warns before it takes a machine, where the trace does not say
    has_copies     whether those that are left have all state when others go (replicas, buddies)
    machines       asked for; 0: the most that there is a speed for
    batch          samples per step on each machine, and
    noise_batch    the gradient noise scale, in samples; 0.0: the batch does not grow with machines
    Raises:   FleetError: an impossible number.
    """

    steps: float
    speeds: tuple[Speed, ...]
    start_s: float = 165.0
    reform_s: float = 0.5
    restart_s: float = 30.0
    checkpoint_s: float = 10.0
    every_s: float | None = None
    notice_s: float = 0.0
    has_copies: bool = False
    machines: int = 0
    batch: float = 1.0
    noise_batch: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.steps < math.inf:
            raise FleetError(f"a job of {self.steps} steps", hint="give more than 0 steps")
        if not self.speeds:
            raise FleetError("a job without a speed", hint="give steps per second on n machines")
        for name in ("start_s", "reform_s", "restart_s", "checkpoint_s", "notice_s", "noise_batch"):
            value: float = getattr(self, name)
            if not 0 <= value <= _MOST_S:
                message = f"{name} of the job is {value:g}"
                raise FleetError(message, hint=f"give 0 to {_MOST_S:g}")
        if self.every_s is not None and not self.every_s > 0:
            raise FleetError(f"every_s of the job is {self.every_s}", hint="give more than 0")
        if not 0 < self.batch <= _MOST_S:
            message = f"batch of the job is {self.batch:g}"
            raise FleetError(message, hint=f"give more than 0, at most {_MOST_S:g}")
        counts = [speed.machines for speed in self.speeds]
        if len(set(counts)) < len(counts):
            raise FleetError("two speeds on as many machines", hint="give one for each number")
        if self.machines < 0 or (self.machines and self.machines < min(counts)):
            message = f"a job on {self.machines} machines; the least with a speed is {min(counts)}"
            raise FleetError(message, hint="ask for more machines, or give their speed")
        if self.machines > MOST_HELD:
            raise FleetError(f"a job on {self.machines} machines", hint=f"{MOST_HELD} at most")
        fastest = max(speed.steps_per_s for speed in self.speeds)
        if self.steps / fastest > _MOST_S:
            message = f"{self.steps:g} steps at {fastest:g} steps/s take {self.steps / fastest:g} s"
            raise FleetError(message, hint=f"give a job of {_MOST_S:g} s at most")

    @property
    def size(self) -> int:
        """Return the number of machines that is asked for."""
        return self.machines or max(speed.machines for speed in self.speeds)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of machines that there is a plan for, up to `size`."""
        return tuple(sorted(s.machines for s in self.speeds if s.machines <= self.size))

    def plan_of(self, machines: int) -> str:
        """Return the name of the plan that so many machines run."""
        fit = [speed for speed in self.speeds if speed.machines <= machines]
        return max(fit, key=lambda speed: speed.machines).plan if fit else ""

    def table(self) -> Floats:
        """Return useful steps per second by machines: [0 .. size].

        A step of k machines counts `efficiency(k * batch)` of one at the least number of machines.
        """
        found = np.zeros(self.size + 1)
        for speed in sorted(self.speeds, key=lambda speed: speed.machines):
            if speed.machines <= self.size:
                share = 1.0
                if self.noise_batch:
                    first = self.sizes[0] * self.batch
                    share = progress(speed.machines * self.batch, first, self.noise_batch)
                found[speed.machines :] = speed.steps_per_s * share
        return found

    def seconds(self, machines: int) -> float:
        """Return the seconds that all steps take on so many machines, if none is lost."""
        return self.steps / float(self.table()[min(machines, self.size)])


def with_figures(job: FleetJob, rates: Mapping[int, float], **seconds: float | None) -> FleetJob:
    """Return a job with seconds that were measured, where they were, and speeds moved by them.

    rates     steps per second by machines, as measured; speeds on other numbers are taken to be
              off by the same factor, in the mean of logarithms
    """
    known = {speed.machines: speed for speed in job.speeds}
    off = [math.log(rate / known[n].steps_per_s) for n, rate in rates.items() if n in known]
    factor = math.exp(sum(off) / len(off)) if off else 1.0
    speeds = {n: replace(s, steps_per_s=s.steps_per_s * factor) for n, s in known.items()}
    for count, rate in rates.items():
        speeds[count] = Speed(count, rate, known[count].plan if count in known else "")
    found = tuple(speeds[count] for count in sorted(speeds))
    given = {name: value for name, value in seconds.items() if value is not None}
    return replace(job, speeds=found, machines=job.size, **given)


def progress(batch: float, first: float, noise: float) -> float:
    """Return the steps of batch `first` that a step of `batch` is worth: at most batch / first.

    (1 + noise / first) / (1 + noise / batch): near batch / first below the noise scale, and no more
    than 1 + noise / first however large the batch: the limit of large batches.

    Source:   "An Empirical Model of Large-Batch Training", arXiv:1812.06162; Pollux, OSDI 2021.
    """
    return (1 + noise / first) / (1 + noise / batch)


def young_daly_s(checkpoint_s: float, mean_life_s: float) -> float:
    """Return the seconds between checkpoints that lose least: sqrt(2 * C * M).

    Of a constant hazard.  inf where nothing is lost.
    Source:   J. W. Young, 1974; J. T. Daly, 2006.
    """
    return math.sqrt(2 * checkpoint_s * mean_life_s) if mean_life_s < math.inf else math.inf


def read_job(path: Path | str) -> FleetJob:
    """Return the job of a TOML file: the fields of `FleetJob`, speeds as a table by machines.

    Raises:   FleetError: no such file, not TOML, or a field that is not known or cannot be.
    """
    place = f"job {path}"
    try:
        content = tomllib.loads(read_bytes(path, FleetError, "job").decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise FleetError(f"{place} is not TOML: {problem}", hint=_HINT) from problem
    with damage(place, FleetError, hint=_HINT):
        content["speeds"] = _speeds(content.get("speeds"))
        return typed(FleetJob, content)


def _speeds(given: object) -> object:
    """Return a table {machines: steps per second} as a list; a list as it is."""
    if not isinstance(given, dict):
        return given if given is not None else []
    found: list[object] = []
    table = typed(dict[str, float], cast("object", given))
    for machines, rate in table.items():
        if not machines.isdigit():
            raise MisfitError(f"is for {machines!r}, not a number of machines", "speeds")
        found.append({"machines": int(machines), "steps_per_s": rate})
    return found
