"""Solve: the constants of clusters, together, from measured runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from penstock.estimate.priors import Prior, Quantity, priors, values_of, z_of
from penstock.estimate.work_terms import Floats, Terms
from penstock.extras import need

Function = Callable[[Floats], Floats]

_SCATTER = {"time": 0.05, "memory": 0.03}  # of runs about the best constants, as a logarithm
_ALIKE = 40  # runs of one cluster share errors: n of them tell as much as 1 / (1/n + 1/40)
_ROUNDS = 40


class ClusterRuns(NamedTuple):
    """The runs of one cluster: their terms, what was measured, and where they stand."""

    terms: Terms
    values: Floats
    axes: dict[str, float]


class Solution(NamedTuple):
    """What was found: z of the middle, trends, and each cluster's own, [cluster, constant]."""

    middle: Floats
    trend: Floats
    own: Floats


class _LeastSquares(NamedTuple):
    quantity: Quantity
    priors: tuple[Prior, ...]
    clusters: Sequence[ClusterRuns]
    root: Floats  # of the covariance between clusters
    axes: Floats  # [cluster, constant]

    def unpacked(self, x: Floats) -> Solution:
        """Return the constants that unit normal numbers stand for."""
        count = len(self.priors)
        middle = np.array(
            [z_of(p, p.value) + p.doubt * v for p, v in zip(self.priors, x, strict=False)]
        )
        slopes = x[count : 2 * count]
        trend = np.array(
            [p.slope[0] + p.slope[1] * v for p, v in zip(self.priors, slopes, strict=True)]
        )
        own = self.root @ x[2 * count :].reshape(-1, count)
        return Solution(middle, trend, own * np.array([p.own for p in self.priors]))

    def z(self, x: Floats) -> Floats:
        """Return z of every cluster and constant."""
        found = self.unpacked(x)
        return found.middle + found.trend * self.axes + found.own

    def misfits(self, x: Floats) -> Floats:
        """Return the numbers, and the errors in units of their scatter: both are to be small."""
        parts = [x]
        for cluster, z in zip(self.clusters, self.z(x), strict=True):
            ratio = cluster.terms.of(values_of(self.quantity, z)) / cluster.values
            parts.append(_soft(_weight(self.quantity, cluster) * np.log(ratio))[0])
        return np.concatenate(parts)

    def slopes(self, x: Floats) -> Floats:
        """Return the derivatives of `misfits`."""
        count, size = len(self.priors), len(x)
        doubt, step, own = (
            np.array(each)
            for each in zip(*((p.doubt, p.slope[1], p.own) for p in self.priors), strict=True)
        )
        parts = [np.eye(size)]
        for at, (cluster, z) in enumerate(zip(self.clusters, self.z(x), strict=True)):
            value, slope = cluster.terms.with_slopes(values_of(self.quantity, z))
            weight = _weight(self.quantity, cluster)
            change = weight * slope * np.exp(z) / value[:, None]
            change *= _soft(weight * np.log(value / cluster.values))[1][:, None]
            rows = np.zeros((len(value), size))
            rows[:, :count] = change * doubt
            rows[:, count : 2 * count] = change * step * self.axes[at]
            both = self.root[at][None, :, None] * (change * own)[:, None, :]
            rows[:, 2 * count :] = both.reshape(len(value), -1)
            parts.append(rows)
        return np.concatenate(parts)


def _weight(quantity: Quantity, cluster: ClusterRuns) -> float:
    return 1 / _SCATTER[quantity] / (1 + (len(cluster.values) - 1) / _ALIKE) ** 0.5


def solve(quantity: Quantity, clusters: Sequence[ClusterRuns], shared: Floats) -> Solution:
    """Return the most probable constants: errors are weighed softly, so that wild runs count less.

    shared   the covariance of what is own, between clusters
    """
    table = priors(quantity)
    axes = [[{"": 0.0, **one.axes}[p.axis] for p in table] for one in clusters]
    root = cast("Floats", np.linalg.cholesky(shared))
    problem = _LeastSquares(quantity, table, clusters, root, np.array(axes))
    start = np.zeros((2 + len(clusters)) * len(table))
    found = _least(problem.misfits, start, problem.slopes)
    return problem.unpacked(found)


def _soft(errors: Floats) -> tuple[Floats, Floats]:
    """Return softened errors, which are squared in their place, and their derivative.

    The square is 2 * (sqrt(1 + e^2) - 1): that of small errors, twice the absolute value of large
    ones, so that wild runs count less.
    """
    long = np.sqrt(1 + np.square(errors))
    soft = np.sign(errors) * np.sqrt(2 * (long - 1))
    small = np.abs(errors) < 1e-4
    change = np.where(small, 1.0, errors / long / np.where(small, 1.0, soft))
    return np.where(small, errors, soft), change


def _least(misfits: Function, start: Floats, slopes: Function) -> Floats:
    """Return where the sum of squares is least."""
    need("scipy", "solvers", "a fit of constants")
    from scipy.optimize import least_squares  # pyright: ignore  - no types; loading it takes a while

    found = cast("Any", least_squares)(misfits, start, slopes, max_nfev=_ROUNDS)
    return cast("Floats", found.x)


class Own(NamedTuple):
    """Constants of one cluster, and the doubt that is left in z."""

    z: Floats
    doubt: Floats


def solve_one(quantity: Quantity, measured: ClusterRuns, z: Floats, doubt: Floats) -> Own:
    """Return the constants of a cluster that was expected to have `z`, give or take `doubt`."""
    weight = _weight(quantity, measured)

    def misfits(x: Floats) -> Floats:
        ratio = measured.terms.of(values_of(quantity, z + doubt * x)) / measured.values
        return np.concatenate([x, _soft(weight * np.log(ratio))[0]])

    def slopes(x: Floats) -> Floats:
        at = z + doubt * x
        value, slope = measured.terms.with_slopes(values_of(quantity, at))
        change = weight * slope * np.exp(at) / value[:, None]
        change *= _soft(weight * np.log(value / measured.values))[1][:, None]
        return np.concatenate([np.eye(len(x)), change * doubt])

    found = _least(misfits, np.zeros(len(z)), slopes)
    rows = slopes(found)
    left = np.sqrt(np.diag(np.linalg.inv(rows.T @ rows)))
    return Own(z + doubt * found, doubt * left)
