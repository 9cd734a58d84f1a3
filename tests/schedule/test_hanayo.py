import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import bubble_fraction, hanayo, peak_activations
from tests.schedule.toy import costs, picture, step

sizes, ranks, waves, seconds = (
    st.integers(1, 12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
)


@given(ranks, waves, st.integers(0, 12), seconds, seconds)
def test_bubble_is_the_closed_form(num_ranks, num_waves, more, f, b):
    num_stages, m = 2 * num_waves * num_ranks, num_ranks + more
    measured = step(hanayo(num_stages, m, num_ranks=num_ranks), costs(f, b, 0))
    assert measured == 2 * num_waves * m * (f + b) + 2 * (num_ranks - 1) * max(f, b)


@given(st.integers(2, 5), st.integers(0, 9))
def test_bubble_falls_with_the_number_of_waves(num_ranks, more):
    shares = [
        bubble_fraction(hanayo(2 * w * num_ranks, num_ranks + more, waves=w)) for w in (1, 2, 3, 4)
    ]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == len(shares)


@given(ranks, waves)
def test_fraction_of_one_unit_is_that_of_the_paper_up_to_its_denominator(num_ranks, num_waves):
    """(2 P - 2) / (3 P W + 2 P - 2) for T_B = 2 T_F."""
    made = hanayo(2 * num_waves * num_ranks, num_ranks, waves=num_waves)
    lost = 2 * num_ranks - 2
    assert bubble_fraction(made) == pytest.approx(lost / (3 * num_ranks * num_waves + lost))


@given(ranks, waves, st.integers(0, 12))
def test_rank_holds_what_the_docstring_says(num_ranks, num_waves, more):
    m = num_ranks + more
    greatest = -(-m // (m // num_ranks))
    most = 2 * num_waves * num_ranks + 2 * (num_waves - 1) * (greatest - num_ranks)
    made = hanayo(2 * num_waves * num_ranks, m, num_ranks=num_ranks)
    assert max(peak_activations(made)) <= most
    assert m % num_ranks or max(peak_activations(made)) == 2 * num_waves * num_ranks


@given(sizes, sizes, waves)
def test_waves_are_two_stages_per_rank_and_turn_at_the_ends(num_stages, m, num_waves):
    made = hanayo(num_stages, m, waves=num_waves)
    assert made.num_ranks == -(-num_stages // (2 * num_waves))
    there = list(range(made.num_ranks))
    homes = (there + there[::-1]) * num_waves
    assert made.stage_ranks == tuple((home,) for home in homes[:num_stages])


@pytest.mark.parametrize("wrong", [{"waves": 0}, {"num_ranks": 0}])
def test_no_wave_or_no_rank_is_refused(wrong):
    with pytest.raises(ScheduleError, match=r"make no schedule|waves is 0"):
        hanayo(4, 4, **wrong)


def test_picture_in_the_docstring_is_what_runs():
    doc = sys.modules[hanayo.__module__].__doc__
    assert picture(hanayo(4, 2), costs(1, 1, 0), stages=True) in doc
