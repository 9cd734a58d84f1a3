"""Time and cost over ranks and batch, from phases whose law is known, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.fleet.batch_size import Phase, phases

GRID = [(ranks, batch) for ranks in (1, 2, 4, 8) for batch in (8, 16, 64, 256)]
seconds = st.floats(0.001, 1.0)


def took(ranks, batch, law):
    start, sample, sums = law
    return start + sample * batch / ranks + sums * (ranks - 1) / ranks


@given(seconds, seconds, seconds, st.floats(1.0, 1000.0), st.floats(10, 1e5))
def test_best_of_what_is_foreseen_is_the_best_of_all(start, sample, sums, scale, least):
    """Phases of three kinds, without noise: every option has the seconds of the law."""
    law = start, sample, sums
    told = [Phase(k, b, took(k, b, law), scale, 3) for k, b in ((1, 8), (1, 64), (2, 16))]
    found = phases(told).options(GRID, steps=least * (1 + scale / 8), batch=8, usd_per_hour=2.0)
    exact = {(k, b): least * (1 + scale / b) * took(k, b, law) for k, b in GRID}
    for one in found:
        assert one.seconds == pytest.approx(exact[one.ranks, one.batch], rel=1e-4)
        assert one.usd == pytest.approx(one.seconds / 3600 * 2.0 * one.ranks)
    best = min(found, key=lambda one: one.seconds)
    assert best.seconds == pytest.approx(min(exact.values()), rel=1e-4)


def test_noise_is_the_mean_by_steps_that_were_watched():
    told = [Phase(1, 8, 1.0, 10.0, 1), Phase(1, 16, 2.0, 40.0, 2), Phase(2, 16, 2.0)]
    assert phases(told).scale == pytest.approx(30.0)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ([], "0 runs of one kind"),
        ([Phase(1, 8, 1.0, 5.0, 1)] * 2, "2 runs of one kind"),
        ([Phase(1, 8, 1.0), Phase(1, 16, 1.0)], "no run tells"),
        ([Phase(1, 8, 1.0, math.inf, 1), Phase(1, 16, 1.0)], "no run tells"),
    ],
)
def test_phases_that_tell_too_little_are_refused(told, error):
    with pytest.raises(EstimateError, match=error):
        phases(told)


@pytest.mark.parametrize("wrong", [(0, 8, 1.0), (1, 0, 1.0), (1, 8, 0.0)])
def test_phase_that_cannot_be_is_refused(wrong):
    with pytest.raises(EstimateError, match="ranks take"):
        Phase(*wrong)
