"""Solve: constants from measured values, none below zero."""

from typing import NamedTuple, cast

import numpy as np
from scipy.optimize import nnls  # pyright: ignore  - scipy has no types

from penstock.estimate.terms import Floats, Terms

_ROUNDS = 60
_ENOUGH = 1e-12
_MOST_STEPS = 100  # a constant
_FLOOR = 0.02  # relative errors below this count alike: between least squares and least sum


class Prior(NamedTuple):
    """What constants are without any data, and how firmly: that a constant is doubled costs
    0.19 * weight, that it is zero 0.5 * weight, in sums of relative errors.
    """

    values: Floats
    weight: Floats


def solve(terms: Terms, measured: Floats, prior: Prior) -> Floats:
    """Return the constants that make the sum of |relative error| least, with `prior` added.

    The values are homogeneous of degree one in the constants, so value = slope @ constants, and a
    Gauss-Newton step is a non-negative least squares problem; its runs are weighed by
    1 / max(error, 2 %), which turns squares into absolute values.  A step that makes
    things worse is halved.

    Ignores:  that there may be other minima, where a stage changes the lane that it waits for.
    """
    constants = prior.values.copy()
    best = _loss(terms, measured, prior, constants=constants)
    for _ in range(_ROUNDS):
        goal = _step(terms, measured, prior, constants=constants)
        for part in (1.0, 0.5, 0.25, 0.1, 0.02):
            tried = constants + part * (goal - constants)
            loss = _loss(terms, measured, prior, constants=tried)
            if loss < best:
                break
        else:
            return constants
        gain, best, constants = best - loss, loss, tried
        if gain < _ENOUGH:
            return constants
    return constants


def _step(terms: Terms, measured: Floats, prior: Prior, *, constants: Floats) -> Floats:
    value, slope = terms.with_slopes(constants)
    error = np.abs(value / measured - 1)
    weight = 1 / np.sqrt(np.maximum(error, _FLOOR))
    scale = prior.values  # columns in units of the prior: all near 1
    rows = slope / measured[:, None] * scale * weight[:, None]
    force = np.sqrt(prior.weight) / np.maximum(1, constants / scale)
    goal = np.concatenate([weight, force])
    matrix = np.concatenate([rows, np.diag(force)])
    found = cast("Floats", nnls(matrix, goal, maxiter=_MOST_STEPS * len(scale))[0])
    return found * scale


def _loss(terms: Terms, measured: Floats, prior: Prior, *, constants: Floats) -> float:
    """Return the loss whose minimum the weighted steps seek: Huber's, over 2 %, and the prior."""
    error = np.abs(terms.of(constants) / measured - 1)
    run = np.where(error < _FLOOR, error**2 / (2 * _FLOOR), error - _FLOOR / 2)
    ratio = constants / prior.values
    more = np.maximum(ratio, 1)
    stray = np.where(ratio < 1, np.square(ratio - 1) / 2, np.log(more) + 1 / more - 1)
    return float(run.sum() + prior.weight @ stray)
