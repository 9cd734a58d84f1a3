"""Fit: planted constants come back, intervals cover, what is left out is not seen."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.estimate import Sample, fit, predict
from penstock.estimate.constants import prior, terms
from penstock.estimate.fit import left_out, spread
from penstock.estimate.solve import Prior, solve
from tests.draws import examples
from tests.estimate.runs import run_of


def spread_of_runs(number, seed=0):
    """Return runs that differ in everything that a constant stands for."""
    pick = random.Random(seed).choice
    return [
        run_of(
            hidden=pick([256, 1024, 4096]),
            blocks=pick([4, 8, 24]),
            pipe=pick([1, 2, 4]),
            tensor=pick([1, 2, 8, 16]),
            data=pick([1, 4, 64]),
            sequence=pick([128, 1024, 8192]),
            micro_batch=pick([1, 2, 8]),
            num_micro_batches=pick([1, 4, 16]),
            recompute=pick(["none", "selective", "full"]),
            sharding=pick(["none", "full"]),
        )
        for _ in range(number)
    ]


@given(st.integers(0, 9), st.lists(st.floats(0.5, 2), min_size=19, max_size=19))
@examples(5)
def test_planted_constants_come_back(seed, scale):
    made = terms("time", spread_of_runs(300, seed))
    planted = prior("time").values * np.array(scale)
    free = Prior(prior("time").values, np.full(19, 1e-9))
    found = solve(made, made.of(planted), free)
    matters = made.with_slopes(planted)[1].max(axis=0) > 0
    assert found[matters] == pytest.approx(planted[matters], rel=1e-3)
    assert found[~matters] == pytest.approx(free.values[~matters])
    assert made.of(found) == pytest.approx(made.of(planted), rel=1e-5)


@given(st.lists(st.floats(0.1, 10), min_size=40, max_size=40))
@examples(8)
def test_no_constant_is_below_zero(noise):
    made = terms("time", spread_of_runs(40))
    measured = made.of(prior("time").values) * np.array(noise)
    assert solve(made, measured, prior("time")).min() >= 0


def test_one_wild_run_does_not_move_the_others():
    """Absolute errors, not squares: one run of 60 that took ten times as long."""
    made = terms("time", spread_of_runs(60))
    true = made.of(prior("time").values)
    measured = true.copy()
    measured[7] *= 10
    found = made.of(solve(made, measured, prior("time")))
    assert np.median(np.abs(found / true - 1)) < 0.01


def noisy(number, seed, sigma=0.1):
    runs = spread_of_runs(number, seed)
    noise = np.random.default_rng(seed).lognormal(0, sigma, number)
    values = terms("time", runs).of(prior("time").values * 1.3) * noise
    return [Sample(run, float(value), None) for run, value in zip(runs, values, strict=True)]


@pytest.mark.parametrize("seed", range(2))
def test_interval_covers_nine_in_ten_new_runs(seed):
    constants = fit(noisy(80, seed))
    new = noisy(200, seed + 100)
    estimates = predict("time", [sample.run for sample in new], constants)
    inside = [e.low <= s.seconds <= e.high for e, s in zip(estimates, new, strict=True)]
    assert 0.8 <= np.mean(inside) <= 0.99  # 80 runs tell the quantile to 0.04


def test_spread_is_the_quantile_of_errors_left_out():
    ratio = np.exp(np.linspace(0.01, 0.19, 19))
    assert spread(ratio) == pytest.approx(0.18)  # the 18th of 19: ceil(0.9 * 20)
    assert spread(1 / ratio) == pytest.approx(0.18)
    assert spread(np.exp(np.array([0.1, -0.2]))) == pytest.approx(1.5 * 0.2)


def test_prediction_of_a_group_does_not_depend_on_what_it_measured():
    samples = noisy(60, 1)
    key = lambda run: run.model.hidden  # noqa: E731
    lied = [s._replace(seconds=s.seconds * 9) if key(s.run) == 1024 else s for s in samples]
    honest, other = left_out("time", samples, key), left_out("time", lied, key)
    own = np.array([key(sample.run) == 1024 for sample in samples])
    assert own.any()
    assert not own.all()
    assert honest[own] == pytest.approx(other[own])
    assert honest[~own] != pytest.approx(other[~own])


def test_clusters_are_fitted_apart_and_memory_where_it_was_measured():
    slow = [s._replace(seconds=2 * s.seconds, peak_bytes=1e10) for s in noisy(30, 2, 0.0)]
    slow = [s._replace(run=replace(s.run, cluster="slow")) for s in slow]
    found = fit([*noisy(30, 2, 0.0), *slow])
    assert [(c.quantity, c.cluster, c.runs) for c in found] == [
        ("time", "slow", 30),
        ("memory", "slow", 30),
        ("time", "tests", 30),
    ]
    by_name = {(c.quantity, c.cluster): c for c in found}
    runs = [sample.run for sample in noisy(30, 2)]
    ratio = terms("time", runs).of(by_name["time", "slow"].array)
    ratio = ratio / terms("time", runs).of(by_name["time", "tests"].array)
    assert np.median(ratio) == pytest.approx(2, rel=0.1)


def test_a_single_run_can_be_fitted_and_none_cannot():
    (found,) = fit(noisy(1, 0))
    assert (found.runs, found.groups) == (1, "nothing")
    with pytest.raises(EstimateError, match="no run to fit on"):
        fit([])
