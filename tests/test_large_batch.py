"""Rates for large batches: scaled, and warmed up to."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import JobError


@given(st.integers(1, 50), st.floats(0, 1), st.integers(0, 100))
def test_a_warm_up_grows_evenly_to_one_and_then_asks(steps, start, later):
    rate = ps.warm_up(steps, start=start, then=lambda step: 0.5**step)
    factors = [start, *(rate(step) for step in range(steps))]
    rises = [after - before for before, after in pairwise(factors)]
    assert rises == pytest.approx([(1 - start) / steps] * steps, abs=1e-12)
    assert rate(steps - 1) == pytest.approx(1.0)
    assert rate(steps + later) == 0.5**later
    assert ps.warm_up(steps)(steps + later) == 1.0


def test_a_rate_is_scaled_by_the_samples_of_a_step():
    assert ps.scaled_rate(0.1, 1024, 256) == pytest.approx(0.4)
    assert ps.scaled_rate(0.1, 1024, 256, "root") == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ps.warm_up(0), "a warm-up of 0 steps"),
        (lambda: ps.warm_up(3, start=2), "a warm-up from 2"),
        (lambda: ps.warm_up(3, then=0.1), "then is 0.1, no function"),
        (lambda: ps.scaled_rate(0.1, 0, 256), "samples is 0"),
        (lambda: ps.scaled_rate(0.1, 2, 1, "cube"), "how is 'cube'"),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, words):
    with pytest.raises(JobError, match=words):
        call()
