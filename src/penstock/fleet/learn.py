"""Learn: seconds of what was not measured, from what was; and an interval that holds.

    seconds = sum of constant * term, no constant below 0       (what physics says)
              * a factor of the campaign                        (another day, another network)
              * exp(what a regression finds in the rest)        (what physics leaves over)

Constants make relative errors least, drawn to 0 by a ridge.  The ridge and the regression - none, a
Gaussian process where rows are few, boosted trees where they are many - are those with which groups
that were left out are predicted best.  The group to be judged has no part in that choice.

The interval is that of CV+: 8 of 10 new groups' rows lie inside if groups are alike.  Outside of
the range of what was learned from it is twice as wide, on a logarithmic scale, and no promise.

Source:   CV+, arXiv:1905.02928; regressions: scikit-learn.
Ignores:  that rows of one group are alike: what holds for rows holds for groups roughly.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EstimateError
from penstock.extras import need
from penstock.fleet.measurement import Measurement, Named
from penstock.minima import least_squares

Floats: TypeAlias = NDArray[np.float64]
Rest: TypeAlias = Literal["none", "gaussian process", "trees"]

COVERAGE = 0.8
_RIDGES = 0.03, 0.1, 0.3
_MANY = 40  # groups from which on trees are grown, and below which a Gaussian process is fitted
_FOLDS, _SINGLY = 10, 20  # up to so many groups are left out one at a time
_SHRUNK = 1.0  # groups' worth of a factor of 1, for a campaign
_ROUNDS = 3  # constants and factors by turns
_WIDER = 2.0  # where it extrapolates


class Fitting(NamedTuple):
    """What is chosen by groups left out: the ridge, and how the rest is told."""

    ridge: float
    rest: Rest


class Foreseen(NamedTuple):
    """Seconds, and between which of them 8 of 10 lie.

    outside:   features in which it is outside of what was learned from; the interval is then no
               promise
    """

    seconds: float
    low: float
    high: float
    outside: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class FittedTerms:
    """Constants by term, factors by campaign, and the regression of the rest."""

    constants: Named
    campaigns: Named
    rest: Callable[[Sequence[Measurement]], Floats] | None

    def seconds(self, rows: Sequence[Measurement]) -> Floats:
        """Return the seconds of each row."""
        names = list(self.constants)
        found = _terms(rows, names) @ np.array([self.constants[name] for name in names])
        found = found * np.array([self.campaigns.get(row.campaign, 1.0) for row in rows])
        return found if self.rest is None else found * np.exp(self.rest(rows))


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """What was learned of rows that were measured.

    whole:     fitted on all of them
    folds:     fitted without one fold each, for the interval
    errors:    of each row |log(measured / predicted without its fold)|, and which fold
    ranges:    least and greatest of each feature
    known:     the devices
    """

    choice: Fitting
    whole: FittedTerms
    folds: tuple[FittedTerms, ...]
    errors: Floats
    fold_of: NDArray[np.int64]
    ranges: dict[str, tuple[float, float]]
    known: frozenset[str]

    @property
    def error(self) -> float:
        """Return the mean relative error of groups left out."""
        return float(np.mean(np.expm1(self.errors)))

    def foresee(self, rows: Sequence[Measurement], *, share: float = COVERAGE) -> list[Foreseen]:
        """Return the seconds of each row, and between which of them `share` of such rows lie.

        CV+: quantiles of predicted without fold k * exp(-+ error i), over all rows i of fold k.
        """
        if not rows:
            return []
        centre = self.whole.seconds(rows)
        each = np.array([one.seconds(rows) for one in self.folds])[self.fold_of]
        errors = self.errors[:, None]
        low = np.sort(each * np.exp(-errors), axis=0)
        high = np.sort(each * np.exp(errors), axis=0)
        count = len(self.errors)
        at = math.floor((1.0 - share) * (count + 1)) - 1
        lows, highs = low[max(0, at)], high[min(count - 1, count - 1 - at)]
        return [
            self._around(*of)
            for of in zip(
                rows, map(float, centre), map(float, lows), map(float, highs), strict=True
            )
        ]

    def _around(self, row: Measurement, seconds: float, low: float, high: float) -> Foreseen:
        low, high = min(low, seconds), max(high, seconds)
        outside = self.outside(row)
        if outside:
            low, high = seconds * (low / seconds) ** _WIDER, seconds * (high / seconds) ** _WIDER
        return Foreseen(seconds, low, high, outside)

    def outside(self, row: Measurement) -> tuple[str, ...]:
        """Return the features in which a row lies outside the learned data; also "device"."""
        found = [
            name
            for name, value in row.features.items()
            if not self.ranges[name][0] - 1e-9 <= value <= self.ranges[name][1] + 1e-9
        ]
        return tuple(found) if row.device in self.known else ("device", *found)


def learn(rows: Sequence[Measurement]) -> Learned:
    """Return the model learned from the `rows` that have seconds.

    Raises:   EstimateError: fewer than three groups.
    """
    rows = [row for row in rows if row.seconds is not None]
    groups = list(dict.fromkeys(row.group for row in rows))
    if len(groups) < 3:
        message = f"{len(groups)} groups are measured: {', '.join(groups[:3])}"
        raise EstimateError(message, hint="measure at least three models, or placements")
    odd = next((row for row in rows if row.features.keys() != rows[0].features.keys()), None)
    if odd is not None:
        names = " and ".join(sorted(odd.features.keys() ^ rows[0].features.keys()))
        message = f"{odd.place or odd.group}: {names} is known of some rows, and not of others"
        raise EstimateError(message, hint="fill that column in every row, or in none")
    fold_of = _folds(rows, groups, min(_FOLDS, len(groups)))
    rest: Rest = "trees" if len(groups) >= _MANY else "gaussian process"
    tried = [_tried(rows, fold_of, Fitting(ridge, "none")) for ridge in _RIDGES]
    best = min(tried, key=lambda one: one[2].mean())
    more = _tried(rows, fold_of, Fitting(best[0].ridge, rest))
    choice, folds, errors = min((best, more), key=lambda one: one[2].mean())
    names = rows[0].features.keys()
    ranges = {
        name: (min(row.features[name] for row in rows), max(row.features[name] for row in rows))
        for name in names
    }
    known = frozenset(row.device for row in rows)
    return Learned(choice, fitted(rows, choice), folds, errors, fold_of, ranges, known)


def held_out(
    rows: Sequence[Measurement], tell: Callable[[int, int], None] = lambda done, of: None
) -> list[Foreseen]:
    """Return for each row the prediction of a model that was learned without the row's group.

    With more than 20 groups they are left out in 10 folds.  Rows without seconds are foreseen by
    all that were measured.

    Raises:   EstimateError: too few groups are left.
    """
    groups = sorted({row.group for row in rows if row.seconds is not None})
    count = len(groups) if len(groups) <= _SINGLY else _FOLDS
    fold = {group: at % count for at, group in enumerate(groups)}
    fold_of = [fold[row.group] if row.seconds is not None else count for row in rows]
    found: dict[int, Foreseen] = {}
    for at in range(count + 1):
        own = [place for place, of in enumerate(fold_of) if of == at]
        if own:
            kept = [row for row, of in zip(rows, fold_of, strict=True) if of != at]
            told = learn(kept).foresee([rows[place] for place in own])
            found |= dict(zip(own, told, strict=True))
        tell(at + 1, count + 1)
    return [found[at] for at in range(len(rows))]


def _folds(rows: Sequence[Measurement], groups: Sequence[str], count: int) -> NDArray[np.int64]:
    """Return the fold of each row: whole groups, spread over the order in which they are named."""
    place = {group: at * 7919 % len(groups) for at, group in enumerate(groups)}
    fold = {group: at % count for at, group in enumerate(sorted(groups, key=place.__getitem__))}
    return np.array([fold[row.group] for row in rows])


def _tried(
    rows: Sequence[Measurement], fold_of: NDArray[np.int64], choice: Fitting
) -> tuple[Fitting, tuple[FittedTerms, ...], Floats]:
    folds: list[FittedTerms] = []
    errors = np.zeros(len(rows))
    for fold in range(int(fold_of.max()) + 1):
        kept = [row for row, of in zip(rows, fold_of, strict=True) if of != fold]
        left = [row for row, of in zip(rows, fold_of, strict=True) if of == fold]
        folds.append(fitted(kept, choice))
        errors[fold_of == fold] = np.abs(np.log(_seconds(left) / folds[-1].seconds(left)))
    return choice, tuple(folds), errors


def fitted(rows: Sequence[Measurement], choice: Fitting) -> FittedTerms:
    """Return constants, factors and regression from rows that were measured."""
    names = sorted({name for row in rows for name in row.terms})
    terms, seconds = _terms(rows, names), _seconds(rows)
    constants = _constants(terms, seconds, choice.ridge)
    campaigns = _factors(rows, np.log(seconds / (terms @ constants)))
    factors = np.array([campaigns[row.campaign] for row in rows])
    for _ in range(_ROUNDS if len(campaigns) > 1 else 0):
        constants = _constants(terms, seconds / factors, choice.ridge)
        campaigns = _factors(rows, np.log(seconds / (terms @ constants)))
        factors = np.array([campaigns[row.campaign] for row in rows])
    rest = np.log(seconds / (terms @ constants * factors))
    found = None if choice.rest == "none" else _regression(rows, rest, choice.rest)
    return FittedTerms(dict(zip(names, map(float, constants), strict=True)), campaigns, found)


def _constants(terms: Floats, seconds: Floats, ridge: float) -> Floats:
    """Return the constants, none below 0, that make the squares of relative errors least.

    Each is drawn to 0 by its share of the seconds, `ridge` times as strongly as all rows together.
    """
    rows = terms / seconds[:, None]
    scale = np.maximum(rows.mean(0), 1e-30)
    force = ridge * math.sqrt(len(rows)) * np.eye(len(scale))
    system = np.concatenate([rows / scale, force])
    wanted = np.concatenate([np.ones(len(rows)), np.zeros(len(scale))])
    return least_squares(system, wanted, 0.0, math.inf) / scale


def _factors(rows: Sequence[Measurement], rest: Floats) -> dict[str, float]:
    """Return the factor of each campaign; 1 where there is only one."""
    names = list(dict.fromkeys(row.campaign for row in rows))
    found = dict.fromkeys(names, 1.0)
    for name in names if len(names) > 1 else ():
        own = [at for at, row in enumerate(rows) if row.campaign == name]
        groups = len({rows[at].group for at in own})
        found[name] = math.exp(float(rest[own].mean()) * groups / (groups + _SHRUNK))
    return found


def _regression(
    rows: Sequence[Measurement], rest: Floats, how: Rest
) -> Callable[[Sequence[Measurement]], Floats]:
    """Return the regression of the rest of the logarithm of seconds on the features."""
    need("sklearn", "solvers", "a regression on features")
    values = _features(rows)
    centre, spread = values.mean(0), np.maximum(values.std(0), 1e-9)
    model: Any
    if how == "trees":
        from sklearn import ensemble  # pyright: ignore - no types

        kind: Any = ensemble.HistGradientBoostingRegressor
        model = kind(max_iter=100, min_samples_leaf=5, early_stopping=False)
    else:
        values, rest = _alike(values, rest)
        model = _gaussian_process()
    with warnings.catch_warnings():  # of scales that reach their bounds
        warnings.simplefilter("ignore")
        model.fit((values - centre) / spread, rest)
    return lambda more: np.asarray(model.predict((_features(more) - centre) / spread))


def _gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels  # pyright: ignore

    smooth: Any = kernels.ConstantKernel(0.01, (1e-5, 1.0)) * kernels.RBF(1.0, (0.3, 30.0))
    return GaussianProcessRegressor(smooth + kernels.WhiteKernel(0.01, (1e-5, 1.0)))


def _alike(values: Floats, rest: Floats) -> tuple[Floats, Floats]:
    """Return each row of features once, with the mean of what is left over there."""
    once, which = np.unique(values, axis=0, return_inverse=True)
    which = which.reshape(-1)
    return once, np.bincount(which, rest) / np.bincount(which)


def _terms(rows: Sequence[Measurement], names: Sequence[str]) -> Floats:
    return np.array([[row.terms.get(name, 0.0) for name in names] for row in rows])


def _features(rows: Sequence[Measurement]) -> Floats:
    return np.array([list(row.features.values()) for row in rows])


def _seconds(rows: Sequence[Measurement]) -> Floats:
    return np.array([row.seconds or math.nan for row in rows])
