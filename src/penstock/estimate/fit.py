"""Fit: constants of step time and peak memory from measured runs, cluster by cluster."""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import EstimateError
from penstock.estimate.constants import Constants, Quantity, prior, seen_in, terms
from penstock.estimate.layouts import Sample
from penstock.estimate.run import TrainingRun
from penstock.estimate.solve import solve
from penstock.estimate.terms import Floats

Key = Callable[[TrainingRun], Hashable]

COVERED = 0.9
_FEW = 1.5  # factor on the largest error, where runs are too few for a quantile


def fit(samples: Sequence[Sample]) -> tuple[Constants, ...]:
    """Return constants of time, and of memory where it was measured, for each cluster.

    Non-negative, near priors where the runs leave them open (solve.py).  The interval is that of
    the relative errors of runs whose group was left out: the groups are models, else numbers of
    ranks, else single runs, whichever comes first with more than one.

    Raises:   EstimateError: there is no sample.
    """
    if not samples:
        raise EstimateError("no run to fit on", hint="give at least one finished run")
    found: list[Constants] = []
    for cluster in sorted({sample.run.cluster for sample in samples}):
        own = [sample for sample in samples if sample.run.cluster == cluster]
        found.append(_fit("time", cluster, own))
        sized = [sample for sample in own if sample.peak_bytes is not None]
        if sized:
            found.append(_fit("memory", cluster, sized))
    return tuple(found)


def measured(quantity: Quantity, samples: Sequence[Sample]) -> Floats:
    """Return the measured figure, in seconds or bytes."""
    if quantity == "time":
        return np.array([sample.seconds for sample in samples])
    return np.array([sample.peak_bytes or math.nan for sample in samples])


def _fit(quantity: Quantity, cluster: str, samples: Sequence[Sample]) -> Constants:
    runs = [sample.run for sample in samples]
    made = terms(quantity, runs)
    values = solve(made, measured(quantity, samples), prior(quantity))
    grouping = next((g for g in GROUPINGS if len({g.key(run) for run in runs}) > 1), None)
    if grouping is None:
        predicted, name = made.of(prior(quantity).values), "nothing"
    else:
        predicted, name = left_out(quantity, samples, grouping.key), grouping.name
    ratio = predicted / measured(quantity, samples)
    return Constants(
        quantity,
        cluster,
        dict(zip(made.names, map(float, values), strict=True)),
        spread(ratio),
        float(np.abs(ratio - 1).mean()),
        name,
        len(runs),
        seen_in(runs),
    )


class Grouping(NamedTuple):
    """A way to leave out runs together, and its name."""

    name: str
    key: Key


def _model(run: TrainingRun) -> Hashable:
    return run.model.hidden, run.model.blocks, run.model.sequence


def _ranks(run: TrainingRun) -> Hashable:
    return run.ranks


def _run(run: TrainingRun) -> Hashable:
    return run


GROUPINGS = (Grouping("model", _model), Grouping("ranks", _ranks), Grouping("run", _run))


def left_out(quantity: Quantity, samples: Sequence[Sample], key: Key) -> Floats:
    """Return for each sample the prediction of constants that were fitted without its group."""
    runs = [sample.run for sample in samples]
    all_terms, values = terms(quantity, runs), measured(quantity, samples)
    keys = [key(run) for run in runs]
    predicted = np.zeros(len(runs))
    for group in dict.fromkeys(keys):
        is_out = np.array([k == group for k in keys])
        kept, out = np.flatnonzero(~is_out), np.flatnonzero(is_out)
        constants = prior(quantity).values
        if len(kept):
            constants = solve(all_terms.take(kept), values[kept], prior(quantity))
        predicted[out] = all_terms.take(out).of(constants)
    return predicted


def spread(ratio: Floats) -> float:
    """Return the factor, as a logarithm, within which 9 of 10 new values are of their prediction.

    The ceil(0.9 * (n + 1))-th smallest |log(predicted / measured)| of n values left out; with
    fewer than 9 of them, 1.5 times the largest.

    Ignores:  that new runs may differ from those measured; extrapolation is reported.
    Source:   split conformal prediction, arXiv:1604.04173.
    """
    errors = np.sort(np.abs(np.log(ratio)))
    at = math.ceil(COVERED * (len(errors) + 1))
    return float(errors[at - 1] if at <= len(errors) else _FEW * errors[-1])
