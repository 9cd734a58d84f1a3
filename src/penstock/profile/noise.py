"""Gradient noise: how much gradients of micro-batches differ, and which batch that speaks for.

With g the true gradient and S the sum of the variances of one sample's gradient, a mean over B
samples has E|g_B|^2 = |g|^2 + S / B.  Told of micro-batches of b samples and of their mean over a
step of M micro-batches, both unbiased:

    |g|^2 = (M * large - small) / (M - 1)
    S     = (small - large) * b / (1 - 1 / M)

The noise scale is S / |g|^2, in samples: as many make noise and gradient alike.  A target that
takes n steps with batches without end takes n * (1 + scale / B) with batches of B samples.

Source:   "An Empirical Model of Large-Batch Training", arXiv:1812.06162, appendix A and equation
          2.11; "Scavenger", arXiv:2303.06659 (time and cost over ranks and batch).
Ignores:  curvature, that the scale grows while the loss falls, and optimizers unlike SGD.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import ProfileError

EVERY = 8  # steps, of which one is watched


@dataclass(frozen=True, slots=True)
class NoiseTold:
    """What one rank tells of each step that it watched, in order; of the same steps as the others.

    small:   its part of the mean over micro-batches of |gradient|^2
    large:   its part of |mean gradient|^2
    """

    small: tuple[float, ...] = ()
    large: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """What the gradients of some steps were like.

    steps:          that were watched
    micro_batches:  of a step, over all replicas
    samples:        of a micro-batch
    small, large:   means over steps of |gradient of a micro-batch|^2 and |mean gradient|^2
    """

    steps: int
    micro_batches: int
    samples: int
    small: float
    large: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.steps < 1 or self.micro_batches < 2 or self.samples < 1:
            counts = f"{self.steps} steps of {self.micro_batches} micro-batches of {self.samples}"
            raise ProfileError(
                f"{counts} samples tell nothing of noise",
                hint="at least one step of two micro-batches does",
            )

    @property
    def gradient_sq(self) -> float:
        """Return |g|^2; below 0 where the steps are too few to tell it from noise."""
        return (self.micro_batches * self.large - self.small) / (self.micro_batches - 1)

    @property
    def variance(self) -> float:
        """Return S, the sum of the variances of one sample's gradient."""
        return max(0.0, self.small - self.large) * self.samples / (1 - 1 / self.micro_batches)

    @property
    def scale(self) -> float:
        """Return the noise scale in samples; inf where the gradient drowns in noise."""
        return self.variance / self.gradient_sq if self.gradient_sq > 0 else math.inf

    @property
    def batch(self) -> int:
        """Return the samples of a step."""
        return self.micro_batches * self.samples


def noise_of(told: Sequence[NoiseTold], micro_batches: int, samples: int) -> GradientNoise | None:
    """Return the noise over all ranks; None: there are no figures, or a rank has fewer than others.

    Steps whose gradients were not finite are left out.
    """
    steps = {len(one.small) for one in told}
    if micro_batches < 2 or samples < 1 or steps in (set(), {0}) or len(steps) > 1:
        return None
    small = [math.fsum(row) for row in zip(*(one.small for one in told), strict=True)]
    large = [math.fsum(row) for row in zip(*(one.large for one in told), strict=True)]
    pairs = [
        (s, big)
        for s, big in zip(small, large, strict=True)
        if math.isfinite(s) and math.isfinite(big)
    ]
    if not pairs:
        return None
    means = [math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    return GradientNoise(len(pairs), micro_batches, samples, *means)


def steps_needed(steps: float, batch: float, scale: float, *, other: float) -> float:
    """Return the steps to the target with batches of `other` samples, where `batch` takes `steps`.

    steps * (1 + scale / other) / (1 + scale / batch); with a scale without end steps * batch /
    other.
    """
    if math.isinf(scale):
        return steps * batch / other
    return steps * (1 + scale / other) / (1 + scale / batch)


def gain(batch: float, other: float, scale: float) -> float:
    """Return the number of steps of `batch` samples that one step of `other` samples is worth.

    (1 + scale / batch) / (1 + scale / other); with a scale without end other / batch.
    Source:   AdaScale, arXiv:2007.05105, whose gain ratio this is.
    """
    return 1.0 / steps_needed(1.0, batch, scale, other=other)


def pooled_scale(found: Sequence[GradientNoise]) -> float:
    """Return the noise scale in samples that several stretches of a run tell together.

    Variance and |g|^2 are each the mean by watched steps: a mean of scales would be one of
    quotients.  inf where the gradient drowns in noise; nan without any.
    """
    if not found:
        return math.nan
    variance = sum(one.steps * one.variance for one in found)
    gradient_sq = sum(one.steps * one.gradient_sq for one in found)
    return variance / gradient_sq if gradient_sq > 0 else math.inf
