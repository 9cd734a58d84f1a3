"""Large batch: what becomes of a rate when a step has more samples, and how it is warmed up to.

    linear   rate * k       k times the samples: as far as k steps of before, for SGD
    root     rate * sqrt(k)     keeps the noise of a step, for optimizers like Adam

Sources:  linear and warm-up, arXiv:1706.02677; root, arXiv:1404.5997.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.errors import JobError


def scaled_rate(
    rate: float, samples: int, known: int, how: Literal["linear", "root"] = "linear"
) -> float:
    """Return the rate for steps of `samples`, where `rate` is good for steps of `known`.

    Raises:   JobError: a number is not above 0, or there is no such way.
    """
    for name, value in (("rate", rate), ("samples", samples), ("known", known)):
        if not 0 < value < math.inf:
            raise JobError(f"{name} is {value}", hint="give a number above 0")
    if how not in ("linear", "root"):
        raise JobError(f"how is {how!r}", hint="it can be linear or root")
    factor = samples / known
    return rate * (factor if how == "linear" else math.sqrt(factor))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A factor on the rate that grows from `start` to 1 in so many steps; then it is `then`'s.

    `then` is asked from its step 0 on, when the warm-up is over; without it the factor stays 1.
    Raises:   JobError: a number is out of range, or `then` is no function.
    """

    steps: int
    start: float = 0.0
    then: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise JobError(
                f"a warm-up of {self.steps!r} steps", hint="give 1 or more: ps.warm_up(100)"
            )
        if not 0 <= self.start <= 1:
            raise JobError(f"a warm-up from {self.start}", hint="begin at 0 to 1 of the rate")
        if self.then is not None and not callable(self.then):
            raise JobError(
                f"then is {self.then!r}, no function", hint="then=lambda step: 0.99**step"
            )

    def __call__(self, step: int) -> float:
        """Return the factor of a step; steps count from 0."""
        if step < self.steps:
            return self.start + (1 - self.start) * (step + 1) / self.steps
        return 1.0 if self.then is None else self.then(step - self.steps)


def warm_up(
    steps: int, *, start: float = 0.0, then: Callable[[int], float] | None = None
) -> WarmUp:
    """Return a `Job.learning_rate` that grows linearly to the optimizer's own rate, then `then`.

    start:    the factor before the first step: 1 / k where a rate was scaled by k.
    Raises:   JobError: a number is out of range, or `then` is no function.
    """
    return WarmUp(steps, start, then)
