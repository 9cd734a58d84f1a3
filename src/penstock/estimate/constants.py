"""Constants: those of one quantity for one place, how sure they are, and the runs behind them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.peak_memory import memory_terms
from penstock.estimate.priors import Quantity, priors
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work_terms import Floats, Terms, time_terms

Seen: TypeAlias = "dict[str, tuple[float | str, ...]]"


def terms(quantity: Quantity, runs: Sequence[TrainingRun]) -> Terms:
    """Return the terms of a quantity of `runs`."""
    return time_terms(runs) if quantity == "time" else memory_terms(runs)


def features(run: TrainingRun) -> dict[str, float | str]:
    """Return the sizes and choices of a run, by which a prediction may be outside its data."""
    return {
        "hidden size": run.model.hidden,
        "blocks": run.model.blocks,
        "sequence": run.model.sequence,
        "ranks": run.ranks,
        "tensor": run.tensor,
        "data": run.data,
        "pipe": run.pipe,
        "expert": run.expert,
        "context": run.context,
        "micro-batch": run.micro_batch,
        "micro-batches": run.num_micro_batches,
        "device": "/".join(sorted({device.name for device in run.devices})),
        "recompute": run.recompute,
        "sharding": run.sharding,
    }


def seen_in(runs: Iterable[TrainingRun]) -> Seen:
    """Return the range of every size, and the choices, that `runs` have."""
    found: dict[str, list[float | str]] = {}
    for run in runs:
        for name, value in features(run).items():
            found.setdefault(name, []).append(value)
    seen: Seen = {}
    for name, values in found.items():
        words = sorted({value for value in values if isinstance(value, str)})
        numbers = [value for value in values if not isinstance(value, str)]
        seen[name] = (min(numbers), max(numbers)) if numbers else tuple(words)
    return seen


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of one quantity for one place.

    cluster  whose runs they rest on
    values   1 / efficiency, or seconds or bytes of what is counted
    doubt    standard deviation of the logarithm of each
    spread   standard deviation of log(predicted / measured) beside that
    error    mean relative error of runs whose group was left out of the fit
    groups   by what they were left out
    seen     the ranges and choices fitted on
    asked    the cluster that they were asked for, where none of its runs were fitted
    Raises:   EstimateError: a constant is missing, below zero, or an efficiency above one.
    """

    quantity: Quantity
    cluster: str
    values: dict[str, float]
    doubt: dict[str, float]
    spread: float
    error: float
    groups: str
    runs: int
    seen: Seen
    asked: str = ""

    def __post_init__(self) -> None:
        for prior in priors(self.quantity):
            value, least = self.values.get(prior.name, -1.0), 1.0 if prior.is_efficiency else 0.0
            if not least <= value < math.inf:
                what = f"no value of {least:g} or more for {prior.name}"
                message = f"constants of {self.cluster}: {what}"
                raise EstimateError(message, hint="fit them again")
        for name, seen in self.seen.items():
            words = [value for value in seen if isinstance(value, str)]
            if len(words) != len(seen) and (words or len(seen) != 2):
                message = f"constants of {self.cluster}: {name} is seen in {seen}"
                raise EstimateError(message, hint="give the least and the greatest, or words")

    @property
    def array(self) -> Floats:
        """Return the values in the order of the terms."""
        return np.array([self.values[prior.name] for prior in priors(self.quantity)])

    @property
    def doubts(self) -> Floats:
        """Return the doubt in the order of the terms."""
        return np.array([self.doubt[prior.name] for prior in priors(self.quantity)])

    def outside(self, run: TrainingRun) -> dict[str, float]:
        """Return the features in which `run` lies outside the runs that were fitted.

        With each, by which factor it is beyond them; 0 for a word that was not seen.
        """
        own = features(run)
        far = {name: _beyond(own[name], seen) for name, seen in self.seen.items()}
        return {name: factor for name, factor in far.items() if factor != 1.0}


def _beyond(value: float | str, seen: tuple[float | str, ...]) -> float:
    if isinstance(value, str):
        return 1.0 if value in seen else 0.0
    least, most = cast("tuple[float, float]", seen)
    return value / most if value > most else value / least if value < least else 1.0
