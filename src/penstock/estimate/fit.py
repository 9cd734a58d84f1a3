"""Fit: constants of step time and peak memory from measured runs of any clusters, together."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.constants import Constants, seen_in, terms
from penstock.estimate.pool import ClusterFit, Pooled, covariance
from penstock.estimate.priors import Quantity, priors, values_of, z_of
from penstock.estimate.sample import Sample
from penstock.estimate.site import middle, site_of_run
from penstock.estimate.solve import ClusterRuns, Own, solve, solve_one
from penstock.estimate.training_run import TrainingRun
from penstock.estimate.work_terms import Floats

Key = Callable[[TrainingRun], Hashable]
QUANTITIES: tuple[Quantity, ...] = ("time", "memory")

COVERED = 0.8
WIDE = 1.2816  # standard deviations that hold 8 of 10
_FEW = 1.5  # factor on the largest error, where runs are too few for a quantile
_KEPT = 0.02  # offsets below it are left out


def fit(samples: Sequence[Sample], *, honest: bool = True) -> tuple[Pooled, ...]:
    """Return constants of time, and of memory where it was measured, for all clusters together.

    honest   the spread of each cluster is that of runs whose group was left out: models, else
             numbers of ranks, else single runs, whichever comes first with more than one;
             without it, it is that of a cluster never measured
    Raises:   EstimateError: there is no sample.
    """
    if not samples:
        raise EstimateError("no run to fit on", hint="give at least one finished run")
    pools: list[Pooled] = []
    for quantity in QUANTITIES:
        own = [s for s in samples if quantity == "time" or s.peak_bytes is not None]
        if own:
            pool = _fit(quantity, own)
            for of_cluster in by_cluster(own).values() if honest else ():
                pool = _with_spread(pool, of_cluster)
            pools.append(pool)
    return tuple(pools)


def measured(quantity: Quantity, samples: Sequence[Sample]) -> Floats:
    """Return the measured figure, in seconds or bytes."""
    if quantity == "time":
        return np.array([sample.seconds for sample in samples])
    return np.array([sample.peak_bytes or math.nan for sample in samples])


def by_cluster(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Return the samples of every cluster, by its name."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.run.cluster, []).append(sample)
    return dict(sorted(found.items()))


def _measured(quantity: Quantity, samples: Sequence[Sample]) -> ClusterRuns:
    runs = [sample.run for sample in samples]
    axes = middle([site_of_run(run) for run in runs]).axes
    return ClusterRuns(terms(quantity, runs), measured(quantity, samples), axes)


def _fit(quantity: Quantity, samples: Sequence[Sample]) -> Pooled:
    groups = by_cluster(samples)
    places = [middle([site_of_run(s.run) for s in own]) for own in groups.values()]
    clusters = [_measured(quantity, own) for own in groups.values()]
    solved = solve(quantity, clusters, covariance(places))
    names = [prior.name for prior in priors(quantity)]
    trends = zip(priors(quantity), solved.trend, strict=True)
    fits = [
        _cluster(quantity, own, solved.own[at], places[at])
        for at, own in enumerate(groups.values())
    ]
    return Pooled(
        quantity,
        {name: round(float(z), 3) for name, z in zip(names, solved.middle, strict=True)},
        {prior.name: round(float(slope), 3) for prior, slope in trends if prior.axis},
        tuple(fits),
    )


def _cluster(
    quantity: Quantity, samples: Sequence[Sample], own: Floats, place: tuple[float, ...]
) -> ClusterFit:
    offsets = zip(priors(quantity), own, strict=True)
    runs = [sample.run for sample in samples]
    return ClusterFit(
        runs[0].cluster,
        tuple(round(each, 3) for each in place),
        {p.name: round(float(z), 3) for p, z in offsets if abs(z) >= _KEPT},
        0.1, 0.1, "nothing", len(runs), seen_in(runs),
    )  # fmt: skip


def adapted(pool: Pooled, samples: Sequence[Sample], *, honest: bool = True) -> Pooled:
    """Return a pool that also has the clusters of `samples`; the middle and the trends stay.

    A cluster's own offsets begin at what those like it tell, with the doubt that they leave, so
    that three runs move what they show and nothing else.
    """
    used = [s for s in samples if pool.quantity == "time" or s.peak_bytes is not None]
    for name, own in by_cluster(used).items():
        rest = replace(pool, clusters=tuple(c for c in pool.clusters if c.name != name))
        pool = _adapted(rest, own)
        if honest:
            pool = _with_spread(pool, own)
    return pool


def _adapted(pool: Pooled, samples: Sequence[Sample]) -> Pooled:
    """Return the pool with the one cluster of `samples`."""
    quantity = pool.quantity
    place = middle([site_of_run(sample.run) for sample in samples])
    z, doubt = _expected(quantity, pool.at(place))
    found = solve_one(quantity, _measured(quantity, samples), z, doubt)
    axes = {"": 0.0, **place.axes}
    base = [
        pool.middle[p.name] + pool.trend.get(p.name, 0.0) * axes[p.axis] for p in priors(quantity)
    ]
    one = _cluster(quantity, samples, found.z - np.array(base), place)
    return replace(pool, clusters=(*pool.clusters, one))


def sureness(pool: Pooled, samples: Sequence[Sample], asked: Sample) -> float:
    """Return the deviation of a prediction of `asked`, after `samples` of its cluster.

    As a logarithm, of the constants alone: what they are not sure of after those runs.
    """
    name, quantity = asked.run.cluster, pool.quantity
    rest = replace(pool, clusters=tuple(c for c in pool.clusters if c.name != name))
    place = middle([site_of_run(sample.run) for sample in (samples or [asked])])
    constants = rest.at(place, name)
    z, doubt = _expected(quantity, constants)
    if samples:
        z, doubt = solve_one(quantity, _measured(quantity, samples), z, doubt)
    values = values_of(quantity, z)
    value, slope = terms(quantity, [asked.run]).with_slopes(values)
    return float(np.sqrt(np.square(slope[0] * np.exp(z) * doubt / value[0]).sum()))


def _expected(quantity: Quantity, constants: Constants) -> Own:
    """Return z of constants, and its doubt."""
    pairs = [(p, z_of(p, constants.values[p.name])) for p in priors(quantity)]
    change = np.array([math.exp(each) / constants.values[p.name] for p, each in pairs])
    return Own(np.array([each for _, each in pairs]), constants.doubts / change)


class Grouping(NamedTuple):
    """A way to leave out runs together, and its name."""

    name: str
    key: Key


def _model(run: TrainingRun) -> Hashable:
    return run.model.hidden


def _ranks(run: TrainingRun) -> Hashable:
    return run.ranks


def _run(run: TrainingRun) -> Hashable:
    return run


GROUPINGS = (Grouping("model", _model), Grouping("ranks", _ranks), Grouping("run", _run))


def left_out(pool: Pooled, samples: Sequence[Sample], key: Key) -> Floats:
    """Return for each sample of one cluster the prediction of constants without its group.

    The other clusters of the pool, its middle and its trends stay: what is left out is a group of
    this cluster's runs.
    """
    name = samples[0].run.cluster
    rest = replace(pool, clusters=tuple(c for c in pool.clusters if c.name != name))
    runs = [sample.run for sample in samples]
    made, keys = terms(pool.quantity, runs), [key(run) for run in runs]
    predicted = np.zeros(len(runs))
    for group in dict.fromkeys(keys):
        kept = [sample for sample, k in zip(samples, keys, strict=True) if k != group]
        out = [at for at, k in enumerate(keys) if k == group]
        own = _adapted(rest, kept) if kept else rest
        place = middle([site_of_run(runs[at]) for at in out])
        predicted[out] = made.take(out).of(own.at(place, name).array)
    return predicted


def _with_spread(pool: Pooled, samples: Sequence[Sample]) -> Pooled:
    """Return the pool with the spread of the cluster of `samples`."""
    runs = [sample.run for sample in samples]
    grouping = next((g for g in GROUPINGS if len({g.key(run) for run in runs}) > 1), None)
    if grouping is None:
        return pool
    ratio = left_out(pool, samples, grouping.key) / measured(pool.quantity, samples)
    error = float(np.abs(ratio - 1).mean())
    name = runs[0].cluster
    clusters = [
        replace(one, spread=round(spread(ratio), 4), error=round(error, 4), groups=grouping.name)
        if one.name == name
        else one
        for one in pool.clusters
    ]
    return replace(pool, clusters=tuple(clusters))


def spread(ratio: Floats) -> float:
    """Return the standard deviation with which 8 of 10 new values are inside an interval.

    The ceil(0.8 * (n + 1))-th smallest |log(predicted / measured)| of n values left out, over
    1.28; with fewer than 4 of them, 1.5 times the largest.

    Ignores:  that new runs may differ from those measured; extrapolation is reported.
    Source:   split conformal prediction, arXiv:1604.04173.
    """
    errors = np.sort(np.abs(np.log(ratio)))
    at = math.ceil(COVERED * (len(errors) + 1))
    return float(errors[at - 1] if at <= len(errors) else _FEW * errors[-1]) / WIDE
