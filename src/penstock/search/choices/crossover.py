"""Crossover: from how many devices on a hybrid reaches the target before data parallel does.

    seconds to the target = samples(batch) / batch * seconds per step

Data parallel of N multiplies the batch by N, a hybrid of N / M replicas on M devices each only by
N / M: its steps learn more from each sample.  Speedup over one device, with E the epochs that a
batch needs and a replica's batch fixed, is Pal's formula

    SU_N = N * SE_N * E_1 / E_N                                          SE_N = t_1 / t_N
    SU   = SU^M * (N / M) * SE_(N / M) * E_1 / E_(N / M)                 SU^M = t_1 / t^M

where t are seconds per step, t^M those on M devices and SE_(N / M) what their sums cost.  It is
the first line divided: N samples for 1 in t_N instead of t_1, E_N / E_1 times over.  The law

    samples(batch) = least_samples * (1 + batch / critical_batch)

is a line; it is fitted by least squares of relative errors.  An interval of the critical batch,
which is the ratio of the line's two coefficients, is Fieller's: exact where errors are normal,
without upper end where they may hide that samples grow at all.

Ignores:  that a target may need another learning rate for each batch; anything else that
          changes samples(batch) between two ways of training.
Source:   Pal et al. (arXiv:1907.13257): the formulas, re-derived.  McCandlish et al.
          (arXiv:1812.06162): the law.  Fieller, "Some problems in interval estimation", 1954.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # pyright: ignore  - scipy has no types

from penstock.errors import PlanError
from penstock.search.choices.ring import Ring
from penstock.search.transformer.space import divisors
from penstock.units import format_seconds

_TINY = 1e-300  # a critical batch of nearly nothing: samples grow as the batch


@dataclass(frozen=True, slots=True)
class BatchLaw:
    """How many samples reach the target: least_samples * (1 + batch / critical_batch).

    Raises:   PlanError: a number that is not above 0; least_samples without end.
    """

    least_samples: float
    critical_batch: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.least_samples < math.inf or not self.critical_batch > 0:
            raise PlanError(str(self), hint="least_samples and critical_batch are above 0")

    def samples(self, batch: float) -> float:
        """Return the samples to the target in batches of `batch`."""
        return self.least_samples * (1 + batch / self.critical_batch)


class Fitted(NamedTuple):
    """A law, the interval of its critical batch, and the error of a measurement.

    low, high   critical batches that the measurements do not speak against
    error       relative, as the residuals have it
    """

    law: BatchLaw
    low: float
    high: float
    error: float


def fit_batch_law(measured: Sequence[tuple[float, float]], *, confidence: float = 0.95) -> Fitted:
    """Return the law nearest to measured (batch, samples), by relative errors.

    A line that does not rise is a critical batch of inf.
    Raises:   PlanError: fewer than three measurements, or of one batch; samples that surely fall
              with the batch, or that would be none in small batches.
    """
    batches = np.array([batch for batch, _ in measured], np.float64)
    samples = np.array([count for _, count in measured], np.float64)
    if len(measured) < 3 or len(set(batches)) < 2 or not min(*batches, *samples) > 0:
        message = f"{len(measured)} measurements of {len(set(batches))} different batches"
        raise PlanError(message, hint="give three or more, of two batches at least, all above 0")
    rows = np.stack([1 / samples, batches / samples], axis=1)
    (least, slope), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    residuals = 1 - rows @ np.array([least, slope])
    variance = float(residuals @ residuals) / (len(rows) - 2)
    spread = variance * np.linalg.inv(rows.T @ rows)
    limit = float(stdtrit(len(rows) - 2, (1 + confidence) / 2))
    if least <= 0:
        message = f"the line through the measurements is {least:.4g} samples at a batch of 0"
        raise PlanError(message, hint="measure smaller batches")
    low, high = _fieller(float(least), float(slope), spread * limit**2)
    if slope > 0:
        law = BatchLaw(float(least), float(least / slope))
    else:
        law = BatchLaw(1 / float(np.mean(1 / samples)))
    return Fitted(law, low, high, math.sqrt(variance))


def _fieller(least: float, slope: float, spread: np.ndarray) -> tuple[float, float]:
    """Return the ratios r >= 0 for which (least - r slope)^2 is within the spread of that.

    Raises:   PlanError: none is.
    """
    a = slope**2 - float(spread[1, 1])
    b = least * slope - float(spread[0, 1])
    c = least**2 - float(spread[0, 0])
    root = math.sqrt(max(b * b - a * c, 0.0))
    if a > 0 and c > 0 and b < 0:
        hint = "a law of larger batches that need more samples does not fit them"
        raise PlanError("the samples fall as the batch grows", hint=hint)
    if a > 0:
        return max(0.0, (b - root) / a), (b + root) / a
    return ((b - root) / a if c > 0 else 0.0), math.inf


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train: replicas of `parts` devices each, all of them a step on `batch` samples.

    parts   1: data parallel; more: a hybrid
    Raises:   PlanError: devices that parts do not divide, a batch or seconds not above 0.
    """

    devices: int
    parts: int
    batch: int
    step_s: float

    def __post_init__(self) -> None:
        fit = self.parts > 0 and self.devices > 0 and self.devices % self.parts == 0
        if not fit or self.batch < 1 or not 0 < self.step_s < math.inf:
            hint = "parts divide the devices, batch and seconds are above 0"
            what = f"{self.devices} devices, parts of {self.parts}, a batch of {self.batch}"
            raise PlanError(f"a way with {what}, {self.step_s} s", hint=hint)

    def __str__(self) -> str:
        """Return "4 replicas x 2 devices, batch 128"."""
        return f"{self.devices // self.parts} replicas x {self.parts} devices, batch {self.batch}"


def ways(
    devices: Sequence[int],
    part_s: Mapping[int, float],
    *,
    batch: int,
    gradient_bytes: float,
    ring: Callable[[int], Ring],
) -> tuple[Way, ...]:
    """Return data parallel and hybrids on every number of devices.

    part_s   seconds of a replica's step on M devices, by M
    batch    of one replica
    ring     of so many replicas
    A step takes part_s[M] + the all-reduce of gradient_bytes / M over N / M replicas.

    Ignores:  computing beside the sums; that the M sums of a hybrid may share a link.
    """
    return tuple(
        Way(
            count,
            parts,
            batch * (count // parts),
            part_s[parts] + ring(count // parts).all_reduce_s(gradient_bytes / parts),
        )
        for count in devices
        for parts in divisors(count)
        if parts in part_s
    )


def seconds_to_target(way: Way, samples: Callable[[float], float]) -> float:
    """Return samples(batch) / batch * step_s."""
    return samples(way.batch) / way.batch * way.step_s


class Fastest(NamedTuple):
    """The fastest way on a number of devices, and seconds to the target; inf: there is none."""

    way: Way
    data_parallel_s: float
    hybrid_s: float

    @property
    def seconds(self) -> float:
        return min(self.data_parallel_s, self.hybrid_s)


@dataclass(frozen=True, slots=True)
class Crossover:
    """The fastest way on every number of devices, and from which on a hybrid is.

    devices   the fewest from which on, at every number there is, a hybrid is faster; None: no
              hybrid is faster on the most
    """

    fastest: tuple[Fastest, ...]
    devices: int | None

    def __str__(self) -> str:
        """Return where it is, then a line for each number of devices."""
        if self.devices is None:
            lines = ["no hybrid is faster on the most devices"]
        else:
            lines = [f"a hybrid is faster from {self.devices} devices on"]
        for each in self.fastest:
            taken = f"{format_seconds(each.seconds)} to the target"
            lines.append(f"  {each.way.devices} devices: {each.way}: {taken}")
        return "\n".join(lines)


def crossover(ways: Sequence[Way], samples: Callable[[float], float]) -> Crossover:
    """Return the fastest ways to the target; of equally fast ones data parallel.

    samples   to the target, by the batch: `BatchLaw.samples`, or what was measured
    Raises:   PlanError: no ways.
    """
    if not ways:
        raise PlanError("no ways to train", hint="give one at least")
    found: list[Fastest] = []
    for count in sorted({way.devices for way in ways}):
        here = [way for way in ways if way.devices == count]
        best = min(here, key=lambda way: (seconds_to_target(way, samples), way.parts))
        plain = [seconds_to_target(way, samples) for way in here if way.parts == 1]
        hybrid = [seconds_to_target(way, samples) for way in here if way.parts > 1]
        found.append(Fastest(best, min(plain, default=math.inf), min(hybrid, default=math.inf)))
    since: int | None = None
    for each in reversed(found):
        if each.hybrid_s >= each.data_parallel_s:
            break
        since = each.way.devices
    return Crossover(tuple(found), since)


def crossover_range(ways: Sequence[Way], fitted: Fitted) -> tuple[int | None, int | None]:
    """Return `Crossover.devices` for both ends of the interval of the critical batch.

    The larger the critical batch, the later data parallel is overtaken.
    """
    ends = (max(fitted.low, _TINY), fitted.high)
    laws = (BatchLaw(fitted.law.least_samples, end) for end in ends)
    first, last = (crossover(ways, law.samples).devices for law in laws)
    return first, last
