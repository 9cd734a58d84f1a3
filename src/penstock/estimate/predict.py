"""Predict: step time or peak memory of runs that were not measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import EstimateError
from penstock.estimate.constants import Constants, Quantity, features, terms
from penstock.estimate.run import TrainingRun

_FARTHER = 2.0  # factor on the spread of a run outside of what was fitted on


class Estimate(NamedTuple):
    """A value in seconds or bytes, 9 times in 10 between `low` and `high`.

    cluster   whose constants were used
    outside   the features in which the run is outside what they were fitted on; the interval
              is then twice as wide on a logarithmic scale, and no promise
    """

    value: float
    low: float
    high: float
    cluster: str
    outside: tuple[str, ...]


def predict(
    quantity: Quantity, runs: Sequence[TrainingRun], constants: Sequence[Constants]
) -> tuple[Estimate, ...]:
    """Return an estimate for every run, by the constants of its own cluster or the most similar.

    Most similar are those of the same device, recompute and sharding, then those outside of whose
    ranges fewest sizes are, then those fitted on most runs.

    Raises:   EstimateError: there are no constants of this quantity.
    """
    usable = [item for item in constants if item.quantity == quantity]
    if not usable:
        message = f"no constants of {quantity}"
        raise EstimateError(message, hint=f"fit on a file that has measured {quantity}")
    chosen = [_closest(run, usable) for run in runs]
    found: dict[int, Estimate] = {}
    for item in usable:
        own = [at for at, choice in enumerate(chosen) if choice is item]
        if own:
            values = terms(quantity, [runs[at] for at in own]).of(item.array)
            for at, value in zip(own, values, strict=True):
                found[at] = around(runs[at], float(value), item)
    return tuple(found[at] for at in range(len(runs)))


def _closest(run: TrainingRun, constants: Sequence[Constants]) -> Constants:
    own = next((item for item in constants if item.cluster == run.cluster), None)
    if own is not None:
        return own
    words = {name for name, value in features(run).items() if isinstance(value, str)}

    def distance(item: Constants) -> tuple[int, int, int]:
        outside = item.outside(run)
        return len(words.intersection(outside)), len(outside), -item.runs

    return min(constants, key=distance)


def around(run: TrainingRun, value: float, constants: Constants) -> Estimate:
    """Return the prediction of `constants` for a run: its interval, and where it extrapolates."""
    outside = constants.outside(run)
    if constants.cluster != run.cluster:
        outside = ("cluster", *outside)
    factor = math.exp(constants.spread * (_FARTHER if outside else 1.0))
    return Estimate(value, value / factor, value * factor, constants.cluster, outside)
