"""Latency: seconds on a device that was never profiled, learned from a few runs on it.

A segment takes the sum over classes of ops of what their roofline says at the usual share, and of
their launches, each times a factor of the device:

    seconds = sum over classes of factor * roofline seconds / share  +  factor * launches

Before anything was measured all factors are 1 (roofline.py).  They are learned by weighted least
squares on relative errors, with a normal prior: one factor for the whole device, wide, for peaks
are round guesses; and one for each class, less wide.  So one measured segment moves all classes,
and many tell them apart.  Each run adds what its segments took; as the posterior of some is
the prior of the next, fitting all at once gives the same.

Source:  arXiv:2311.05827 (a light predictor of layers' latency that adapts to unseen devices by
         what they measure).
Ignores: caches, threads but by the device's peaks, and whatever differs within a class.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.cluster.cluster import DeviceKind
from penstock.graph.graph import Graph
from penstock.minima import least_squares
from penstock.profile.roofline import CLASSES, DEFAULT, Efficiency, roofline_s, works_of

_DEVICE_STD, _CLASS_STD = 1.5, 0.5  # of factors, before anything is measured
_NOISE = 0.1  # least relative error of a segment that no factor explains
_RANGE = 0.02, 50.0  # of factors
NUM_PARTS = len(CLASSES) + 1


@dataclass(frozen=True, slots=True)
class TimedSegment:
    """A segment: the seconds that its parts would take with factors of 1, and those it took."""

    parts_s: tuple[float, ...]
    seconds: float


def parts_of(graph: Graph, ops: Iterable[int], device: DeviceKind) -> tuple[float, ...]:
    """Return the seconds of each class of ops on `device`, and of launches, with factors of 1.

    Raises:   ClusterError: the device has no FLOP/s for the dtype of a product.
    """
    parts, share, works = [0.0] * NUM_PARTS, dict(DEFAULT.share), works_of(graph)
    for at in ops:
        if (work := works[at]) is not None:
            parts[CLASSES.index(work.of)] += roofline_s(work, device) / share[work.of]
            parts[-1] += DEFAULT.launch_s
    return tuple(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Latency:
    """What was learned of a device: its factors, how sure they are, and from how many samples.

    noise:  relative error of a segment that factors do not explain.
    """

    factors: NDArray[np.float64]
    covariance: NDArray[np.float64]
    noise: float
    samples: int

    @property
    def efficiency(self) -> Efficiency:
        """Return the shares that ops reach on this device."""
        pairs = zip(DEFAULT.share, self._of_shares(), strict=True)
        share = tuple((name, usual / factor) for (name, usual), factor in pairs)
        return replace(DEFAULT, share=share, launch_s=DEFAULT.launch_s * float(self.factors[-1]))

    def seconds(self, parts_s: Sequence[float]) -> float:
        """Return the seconds of a segment of these parts."""
        return float(np.dot(parts_s, self.factors))

    def error(self, parts_s: Sequence[float]) -> float:
        """Return twice the relative standard deviation of those seconds."""
        parts, seconds = np.array(parts_s), self.seconds(parts_s)
        variance = float(parts @ self.covariance @ parts) / max(seconds, 1e-30) ** 2
        return 2.0 * math.sqrt(variance + self.noise**2)

    def _of_shares(self) -> list[float]:
        return [float(self.factors[CLASSES.index(name)]) for name, _ in DEFAULT.share]


def learned(samples: Sequence[TimedSegment]) -> Latency:
    """Return the model of a device that these samples support."""
    prior = _DEVICE_STD**2 * np.ones((NUM_PARTS, NUM_PARTS)) + _CLASS_STD**2 * np.eye(NUM_PARTS)
    rows = [each for each in samples if each.seconds > 0 and sum(each.parts_s) > 0]
    if not rows:
        return Latency(np.ones(NUM_PARTS), prior, _NOISE, 0)
    scaled = np.array([np.array(each.parts_s) / each.seconds for each in rows])
    root = np.linalg.inv(np.linalg.cholesky(prior))
    noise, factors = _NOISE, np.ones(NUM_PARTS)
    for _ in range(3):  # how well factors explain the samples says how much each sample counts
        system = np.concatenate([scaled / noise, root])
        wanted = np.concatenate([np.ones(len(rows)) / noise, root @ np.ones(NUM_PARTS)])
        factors = least_squares(np.asarray(system, np.float64), wanted, *_RANGE)
        noise = max(_NOISE, float(np.sqrt(np.mean((scaled @ factors - 1.0) ** 2))))
    precision = scaled.T @ scaled / noise**2 + root.T @ root
    covariance = np.asarray(np.linalg.inv(precision), np.float64)
    return Latency(factors, covariance, noise, len(rows))
