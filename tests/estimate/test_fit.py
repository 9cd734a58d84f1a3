"""Fit: planted constants come back, own runs move what they show, what is left out is not seen."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.estimate import Sample, fit, load, predict
from penstock.estimate.constants import terms
from penstock.estimate.datasheet import find_device
from penstock.estimate.fit import adapted, left_out, spread, sureness
from penstock.estimate.priors import TIME_PRIORS, priors, usual, values_of, z_of
from penstock.estimate.site import site_of_run
from tests.draws import examples
from tests.estimate.runs import run_of


def spread_of_runs(number, seed=0, **more):
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
            **more,
        )
        for _ in range(number)
    ]


def planted(shift):
    """Return constants that lie `shift` from the usual ones, in z."""
    z = np.array([z_of(prior, prior.value) for prior in TIME_PRIORS])
    return values_of("time", z + np.array(shift))


def samples_of(runs, constants, sigma=0.0, seed=0):
    noise = np.random.default_rng(seed).lognormal(0, sigma, len(runs))
    values = terms("time", runs).of(constants) * noise
    return [Sample(run, float(value), None) for run, value in zip(runs, values, strict=True)]


@given(st.lists(st.floats(-0.4, 0.4), min_size=len(TIME_PRIORS), max_size=len(TIME_PRIORS)))
@examples(4)
def test_planted_constants_come_back_where_runs_show_them(shift):
    runs = spread_of_runs(120)
    (pool,) = fit(samples_of(runs, planted(shift)), honest=False)
    found = pool.of("tests").array
    ratio = terms("time", runs).of(found) / terms("time", runs).of(planted(shift))
    assert np.abs(np.log(ratio)).mean() < 0.04  # drawn to the usual, a little


@given(st.lists(st.floats(0.1, 10), min_size=40, max_size=40))
@examples(4)
def test_efficiencies_stay_between_0_and_1_whatever_was_measured(noise):
    runs = spread_of_runs(40)
    values = terms("time", runs).of(usual("time")) * np.array(noise)
    samples = [Sample(run, float(v), 1e9) for run, v in zip(runs, values, strict=True)]
    for pool in fit(samples, honest=False):
        for prior, value in zip(priors(pool.quantity), pool.of("tests").array, strict=True):
            assert value >= prior.is_efficiency


def test_one_wild_run_does_not_move_the_others():
    """Errors count softly: one run of 60 that took ten times as long."""
    runs = spread_of_runs(60)
    samples = samples_of(runs, usual("time"))
    wild = [*samples[:7], samples[7]._replace(seconds=10 * samples[7].seconds), *samples[8:]]
    calm, stirred = (
        terms("time", runs).of(fit(each, honest=False)[0].of("tests").array)
        for each in (samples, wild)
    )
    assert np.median(np.abs(stirred / calm - 1)) < 0.015


def test_a_cluster_is_drawn_to_those_like_it_and_not_to_others():
    """Two that are alike and slow, one unlike them: a third of the first kind is slow, too."""
    slow, h100 = planted([1.0] + [0.0] * (len(TIME_PRIORS) - 1)), find_device("h100")
    runs = spread_of_runs(40)
    alike = [
        sample
        for name in ("one", "two")
        for sample in samples_of([replace(run, cluster=name) for run in runs], slow)
    ]
    others = samples_of(spread_of_runs(40, device=h100, cluster="other"), usual("time"))
    together, apart = fit([*alike, *others], honest=False)[0], fit(others, honest=False)[0]
    asked = [run_of(data=4, device=device, cluster="new") for device in (runs[0].devices[0], h100)]
    like, unlike = (
        together.at(site_of_run(run), "new").values["products"]
        / apart.at(site_of_run(run), "new").values["products"]
        for run in asked
    )
    assert like > 1.03 * unlike > 1.03  # both by the middle, one by its neighbours, too


def test_three_own_runs_beat_thirty_alone():
    """Of a cluster whose products and links are not as usual."""
    own = planted([0.5, 0.2, -0.3, 0.6, 0.4, 0.3, 0.2, 0.5])
    new = samples_of(spread_of_runs(60, 5, cluster="mine"), own, 0.03, 5)
    known = fit(samples_of(spread_of_runs(80, 7, cluster="near"), own, 0.03, 7), honest=False)
    thirty = fit(new[:30], honest=False)

    def error(pools):
        found = predict("time", [sample.run for sample in new[30:]], pools)
        return np.mean([abs(e.value / s.seconds - 1) for e, s in zip(found, new[30:], strict=True)])

    three = [adapted(known[0], new[:3], honest=False)]
    assert error(three) < error(known) + 0.01
    assert error(three) < error(thirty) + 0.02


def test_each_run_of_ones_own_makes_a_prediction_surer():
    pool, _ = load()
    runs = spread_of_runs(6, 3, cluster="mine")
    samples = samples_of(runs, usual("time"))
    sure = [sureness(pool, samples[:count], samples[-1]) for count in range(7)]
    assert all(after < 1.05 * before for before, after in itertools.pairwise(sure))
    assert sure[-1] < 0.7 * sure[0]


@pytest.mark.parametrize("seed", range(2))
def test_interval_covers_eight_in_ten_new_runs(seed):
    slow = planted([0.3] * len(TIME_PRIORS))
    pools = fit(samples_of(spread_of_runs(80, seed), slow, 0.1, seed))
    new = samples_of(spread_of_runs(200, seed + 100), slow, 0.1, seed + 100)
    estimates = predict("time", [sample.run for sample in new], pools)
    inside = [e.low <= s.seconds <= e.high for e, s in zip(estimates, new, strict=True)]
    assert 0.6 <= np.mean(inside) <= 0.95  # nine models tell the quantile to 0.15


def test_spread_is_the_quantile_of_errors_left_out():
    ratio = np.exp(np.linspace(0.01, 0.19, 19))
    assert spread(ratio) * 1.2816 == pytest.approx(0.16)  # the 16th of 19: ceil(0.8 * 20)
    assert spread(1 / ratio) * 1.2816 == pytest.approx(0.16)
    assert spread(np.exp(np.array([0.1, -0.2]))) * 1.2816 == pytest.approx(1.5 * 0.2)


def test_prediction_of_a_group_does_not_depend_on_what_it_measured():
    samples = samples_of(spread_of_runs(60, 1), usual("time"), 0.1)
    pool, _ = load()
    key = lambda run: run.model.hidden  # noqa: E731
    lied = [s._replace(seconds=s.seconds * 9) if key(s.run) == 1024 else s for s in samples]
    honest, other = left_out(pool, samples, key), left_out(pool, lied, key)
    own = np.array([key(sample.run) == 1024 for sample in samples])
    assert own.any()
    assert not own.all()
    assert honest[own] == pytest.approx(other[own])
    assert honest[~own] != pytest.approx(other[~own])


def test_memory_is_fitted_where_it_was_measured():
    samples = samples_of(spread_of_runs(30, 2), usual("time"))
    sized = [s._replace(peak_bytes=1e10, run=replace(s.run, cluster="sized")) for s in samples]
    time, memory = fit([*samples, *sized], honest=False)
    assert [one.name for one in time.clusters] == ["sized", "tests"]
    assert [one.name for one in memory.clusters] == ["sized"]


def test_the_same_runs_give_the_same_constants_in_any_order():
    samples = samples_of(spread_of_runs(30, 2), usual("time"), 0.1)
    assert fit(samples) == fit(samples)


def test_a_single_run_can_be_fitted_and_none_cannot():
    (found,) = fit(samples_of(spread_of_runs(1), usual("time")))
    assert [(one.runs, one.groups) for one in found.clusters] == [(1, "nothing")]
    with pytest.raises(EstimateError, match="no run to fit on"):
        fit([])
