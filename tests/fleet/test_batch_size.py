"""Time and cost over ranks and batch, from phases whose law is known, and what is refused."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import EstimateError
from penstock.fleet.batch_size import Phase, crossover, phases, phases_by_copies
from tests.draws import examples

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


@examples(15)
@given(seconds, seconds, st.floats(0.3, 0.9), st.floats(1.0, 300.0))
def test_crossover_is_where_the_laws_of_both_ways_cross(sample, sums, part, scale):
    """Copies of two ranks take `part` of the seconds of one for a sample, and sum as long."""
    laws = {1: (0.0, sample, sums), 2: (0.0, part * sample, sums)}

    def law_s(ranks, batch, copy):
        return took(ranks // copy, batch, laws[copy])

    runs = [(2, 16, 1), (2, 64, 1), (4, 16, 1), (2, 16, 2), (4, 64, 2), (4, 16, 2)]
    told = [Phase(k, b, law_s(k, b, m), scale, 3, m) for k, b, m in runs]
    rows = [(2**n, batch) for n in range(12) for batch in (8, 32, 128)]
    options = [
        one
        for kind in phases_by_copies(told)
        for one in kind.options(rows, steps=100, batch=16, usd_per_hour=1.0)
    ]

    def best_s(ranks, copy):
        return min((1 + scale / b) * law_s(k, b, copy) for k, b in rows if k == ranks)

    wins = [k for k, _ in rows[3::3] if best_s(k, 2) < best_s(k, 1) * (1 - 1e-3)]
    ties = [k for k, _ in rows[3::3] if abs(best_s(k, 2) / best_s(k, 1) - 1) <= 1e-3]
    exact = next((k for k in wins if all(n in wins for n, _ in rows[::3] if n >= k)), None)
    assert ties or crossover(options, "time") == exact


def test_copies_that_do_not_divide_the_ranks_are_refused_and_left_out():
    with pytest.raises(EstimateError, match="no copies of 2 ranks each"):
        Phase(3, 8, 1.0, copy_ranks=2)
    found = phases([Phase(2, 8, 1.0, 5.0, 1, 2), Phase(4, 8, 0.6, 5.0, 1, 2)])
    rows = found.options([(3, 8), (4, 8)], steps=10, batch=8, usd_per_hour=1.0)
    assert [(one.ranks, one.copy_ranks) for one in rows] == [(4, 2)]
