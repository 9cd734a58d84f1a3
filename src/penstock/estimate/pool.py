"""Pooled: one model of all clusters, whose constants are partly their own.

Of constant k on cluster c

    z = middle_k + trend_k * axis(c) + own_ck

with a covariance of `own` between two clusters of own_sd^2 * (0.6 nearness + 0.4 if they are the
same): constants of a cluster are drawn to those of clusters like it, and these to the middle of
all.  A cluster that was not measured has what its neighbours tell of it, and the doubt that they
leave; where there is none near, the middle and the trend alone.

Source:   kriging; partial pooling, "Data Analysis Using Regression and Multilevel Models", 2006.
"""

import math
from dataclasses import dataclass
from typing import cast

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.constants import Constants, Seen
from penstock.estimate.priors import Quantity, priors, values_of
from penstock.estimate.site import Site, nearness
from penstock.estimate.work_terms import Floats

SHARED = 0.6  # of what is a cluster's own, this part is shared by those like it
ELSEWHERE = {"time": 0.06, "memory": 0.04}  # deviation of a run from the best constants
_LIKE = 0.3  # clusters as near as this say what was seen


@dataclass(frozen=True, slots=True)
class ClusterFit:
    """What is a cluster's own: its offsets from the middle, in the order of the terms.

    spread   standard deviation of log(predicted / measured) of runs that were left out
    error    their mean relative error
    groups   by what they were left out
    """

    name: str
    place: tuple[float, ...]
    own: dict[str, float]
    spread: float
    error: float
    groups: str
    runs: int
    seen: Seen


@dataclass(frozen=True, slots=True)
class Pooled:
    """The constants of a quantity for any place.

    middle   z of every constant at the axes' zero
    trend    by the constant, what its axis adds
    Raises:   EstimateError: a constant is missing or no number.
    """

    quantity: Quantity
    middle: dict[str, float]
    trend: dict[str, float]
    clusters: tuple[ClusterFit, ...]

    def __post_init__(self) -> None:
        for prior in priors(self.quantity):
            if not -50 < self.middle.get(prior.name, math.nan) < 50:
                message = f"constants of {self.quantity}: no value for {prior.name}"
                raise EstimateError(message, hint="fit them again")

    @property
    def count(self) -> int:
        """Return the number of constants."""
        return len(self.middle) + len(self.trend) + sum(len(one.own) for one in self.clusters)

    def of(self, cluster: str) -> Constants:
        """Return the constants of a cluster that was measured.

        Raises:   EstimateError: it was not.
        """
        for one in self.clusters:
            if one.name == cluster:
                return self._of(one)
        hint = f"measured: {', '.join(one.name for one in self.clusters)}"
        raise EstimateError(f"no run of cluster {cluster!r} was fitted", hint=hint)

    def at(self, place: Site, cluster: str = "") -> Constants:
        """Return the constants of a place: a cluster's own where it was measured."""
        if any(one.name == cluster for one in self.clusters):
            return self.of(cluster)
        z = self._middle(place)
        if not self.clusters:
            return self._made(z, [prior.own for prior in priors(self.quantity)], place, cluster)
        places = [Site(*one.place) for one in self.clusters]
        near = nearness([place], places)[0]
        weights = cast("Floats", np.linalg.solve(covariance(places), SHARED * near))
        z = z + weights @ np.array([self._own(one) for one in self.clusters])
        left = math.sqrt(max(0.0, 1.0 - float(weights @ near) * SHARED))
        own = [prior.own * left for prior in priors(self.quantity)]
        return self._made(z, own, place, cluster)

    def _middle(self, place: Site) -> Floats:
        axes = {"": 0.0, **place.axes}
        return np.array(
            [
                self.middle[prior.name] + self.trend.get(prior.name, 0.0) * axes[prior.axis]
                for prior in priors(self.quantity)
            ]
        )

    def _own(self, one: ClusterFit) -> list[float]:
        return [one.own.get(prior.name, 0.0) for prior in priors(self.quantity)]

    def _of(self, one: ClusterFit) -> Constants:
        z = self._middle(Site(*one.place)) + np.array(self._own(one))
        values = dict(zip(self.middle, map(float, values_of(self.quantity, z)), strict=True))
        doubt = dict.fromkeys(values, 0.0)
        return Constants(
            self.quantity, one.name, values, doubt, one.spread, one.error, one.groups, one.runs,
            one.seen,
        )  # fmt: skip

    def _made(self, z: Floats, own: list[float], place: Site, cluster: str) -> Constants:
        """Return constants for a cluster that was not measured, and what was seen near it."""
        found = values_of(self.quantity, z)
        values = dict(zip(self.middle, map(float, found), strict=True))
        change = np.exp(z) / found  # of the logarithm, by z
        doubt = dict(zip(self.middle, map(float, change * np.array(own)), strict=True))
        like = self._like(place)
        runs = sum(one.runs for one in like)
        error = sum(one.error * one.runs for one in like) / max(1, runs)
        name = " + ".join(one.name for one in like) or "none"
        spread = ELSEWHERE[self.quantity]
        return Constants(
            self.quantity, name, values, doubt, spread, error, "cluster", runs,
            _union([one.seen for one in like]), asked=cluster or "new",
        )  # fmt: skip

    def _like(self, place: Site) -> list[ClusterFit]:
        """Return the clusters that are near a place, or the nearest."""
        if not self.clusters:
            return []
        devices = nearness(
            [place._replace(ranks=0.0, sharded=0.0)],
            [Site(*one.place)._replace(ranks=0.0, sharded=0.0) for one in self.clusters],
        )[0]
        least = min(_LIKE, float(devices.max()))
        return [one for one, each in zip(self.clusters, devices, strict=True) if each >= least]


def covariance(places: list[Site]) -> Floats:
    """Return the covariance of what is own, between every two clusters, in units of its own."""
    return SHARED * nearness(places, places) + (1 - SHARED) * np.eye(len(places))


def _union(all_seen: list[Seen]) -> Seen:
    """Return the range of all, and the words of any."""
    found: Seen = {}
    for seen in all_seen:
        for name, values in seen.items():
            others = found.get(name, ())
            both = (*others, *values)
            words = sorted({value for value in both if isinstance(value, str)})
            numbers = [value for value in both if not isinstance(value, str)]
            found[name] = (min(numbers), max(numbers)) if numbers else tuple(words)
    return found
