"""Minima: those that scipy finds, and what must hold where a sum of squares is least."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.minima import least_between, least_squares

optimize = pytest.importorskip("scipy.optimize", reason="an extra: penstock[solvers]")


def off(rows, wanted, x) -> float:
    return float(np.square(rows @ x - wanted).sum())


@st.composite
def systems(draw):
    """Draw rows, what is wanted, and bounds; columns may be alike, zero, and of unlike sizes."""
    unknowns = draw(st.integers(1, 6))
    count = draw(st.integers(unknowns, 12))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    rows = random.normal(size=(count, unknowns)) * 10.0 ** random.integers(-3, 4, unknowns)
    if unknowns > 1 and draw(st.booleans()):
        rows[:, 0] = rows[:, 1] * draw(st.sampled_from([1.0, 2.0, 0.0]))
    low = draw(st.sampled_from([0.0, 0.02, -1.0]))
    return rows, random.normal(size=count), low, low + draw(st.sampled_from([0.5, 50.0, math.inf]))


@given(systems())
def test_squares_within_bounds_are_as_few_as_scipys(system):
    rows, wanted, low, high = system
    x = least_squares(*system)
    assert (x >= low).all()
    assert (x <= high).all()
    told = optimize.lsq_linear(rows, wanted, (low, high), method="bvls", tol=1e-14, max_iter=500)
    assert (
        off(rows, wanted, x) <= off(rows, wanted, np.clip(told.x, low, high)) * (1 + 1e-9) + 1e-20
    )


@given(systems())
def test_nothing_gains_by_leaving_its_place(system):
    """The conditions of Karush, Kuhn and Tucker."""
    rows, wanted, low, high = system
    x = least_squares(*system)
    slopes = rows.T @ (rows @ x - wanted)
    slopes /= np.linalg.norm(rows, axis=0) * np.linalg.norm(wanted) + 1e-300
    sure = 1e-8 * (1 + np.abs(rows @ x).sum() / np.linalg.norm(wanted))
    assert (np.abs(slopes[(x > low) & (x < high)]) < sure).all()
    assert (slopes[x == low] > -sure).all()
    assert (slopes[x == high] < sure).all()


@given(st.floats(-3.0, 3.0), st.floats(0.1, 4.0), st.sampled_from([1.0, 2.0, 4.0]))
def test_what_falls_and_rises_is_least_where_it_turns(turn, width, power):
    low, high = turn - width, turn + width / 3
    found = least_between(lambda x: abs(x - turn) ** power, low, high)
    assert abs(found - turn) <= 1e-4
    told = optimize.minimize_scalar(lambda x: abs(x - turn), bounds=(low, high), method="bounded")
    assert abs(found - told.x) <= 2e-4


@given(st.floats(0.1, 4.0), st.booleans())
def test_what_only_falls_or_rises_is_least_at_an_end(width, falls):
    found = least_between(lambda x: -x if falls else x, 1.0, 1.0 + width)
    assert abs(found - (1.0 + falls * width)) <= 1e-5
