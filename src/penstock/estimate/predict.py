"""Predict: step time or peak memory of runs that were not measured."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.constants import Constants, features, terms
from penstock.estimate.fit import WIDE
from penstock.estimate.pool import Pooled
from penstock.estimate.priors import Quantity
from penstock.estimate.site import site_of_run
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work_terms import Floats

_FARTHER = 0.03  # more deviation for every factor of 2 that a size is beyond what was seen
_STRANGE = 0.03  # for a choice that was not seen


class Estimate(NamedTuple):
    """A value in seconds or bytes, 8 times in 10 between `low` and `high`.

    cluster   whose runs it rests on
    outside   the features in which the run is outside of them, each with how far: then it
              extrapolates, and the interval is wider
    rests_on  the runs that it rests on, in words
    """

    value: float
    low: float
    high: float
    cluster: str
    outside: tuple[str, ...]
    rests_on: str


def predict(
    quantity: Quantity, runs: Sequence[TrainingRun], pools: Sequence[Pooled]
) -> tuple[Estimate, ...]:
    """Return an estimate for every run, by the constants of its own cluster or those like it.

    Raises:   EstimateError: there are no constants of this quantity.
    """
    pool = pool_of(quantity, pools)
    groups: dict[object, list[int]] = {}
    for at, run in enumerate(runs):
        key = run.cluster, run.devices, run.ranks, run.sharding
        groups.setdefault(key, []).append(at)
    found: dict[int, Estimate] = {}
    for members in groups.values():
        first = runs[members[0]]
        constants = pool.at(site_of_run(first), first.cluster)
        own = [runs[at] for at in members]
        value, slope = terms(quantity, own).with_slopes(constants.array)
        shares = slope * constants.array / value[:, None]
        for at, one, share in zip(members, value, shares, strict=True):
            found[at] = _around(runs[at], float(one), constants, share)
    return tuple(found[at] for at in range(len(runs)))


def pool_of(quantity: Quantity, pools: Sequence[Pooled]) -> Pooled:
    """Return the constants of a quantity.

    Raises:   EstimateError: there are none.
    """
    for pool in pools:
        if pool.quantity == quantity:
            return pool
    message = f"no constants of {quantity}"
    raise EstimateError(message, hint=f"fit on a file that has measured {quantity}")


def around(run: TrainingRun, value: float, constants: Constants) -> Estimate:
    """Return the prediction of `constants` for a run: its interval, and where it extrapolates."""
    own, slope = terms(constants.quantity, [run]).with_slopes(constants.array)
    return _around(run, value, constants, slope[0] * constants.array / own[0])


def _around(run: TrainingRun, value: float, constants: Constants, share: Floats) -> Estimate:
    """Return an estimate whose deviation has three parts: of constants, of runs, of distance."""
    outside = constants.outside(run)
    far = [abs(math.log2(factor)) if factor else 0.0 for factor in outside.values()]
    more = _FARTHER * max(far, default=0.0) + _STRANGE * sum(not f for f in outside.values())
    of_constants = float(np.square(share * constants.doubts).sum())
    deviation = math.sqrt(of_constants + constants.spread**2 + more**2)
    factor = math.exp(WIDE * deviation)
    words = [*(["cluster"] if constants.asked else []), *map(_words, outside.items())]
    return Estimate(
        value, value / factor, value * factor, constants.cluster, tuple(words),
        rests_on(run, constants),
    )  # fmt: skip


def _words(outside: tuple[str, float]) -> str:
    name, factor = outside
    if not factor:
        return name
    return f"{name} {factor:.3g}x larger" if factor > 1 else f"{name} {1 / factor:.3g}x smaller"


def rests_on(run: TrainingRun, constants: Constants) -> str:
    """Return the runs behind a prediction: how many, on which devices, and how far they are."""
    if not constants.runs:
        return "no run, only on what is usual"
    own = str(features(run)["device"])
    known = [str(name) for name in constants.seen.get("device", ())]
    on = own if own in known else f"{', '.join(known)}, none on {own}"
    beyond = constants.outside(run)
    sizes = {name: factor for name, factor in beyond.items() if factor}
    if not sizes:
        return f"{constants.runs} runs on {on}"
    name = max(sizes, key=lambda each: abs(math.log(sizes[each])))
    return f"{constants.runs} runs on {on}, nearest {_words((name, 1 / sizes[name]))}"
