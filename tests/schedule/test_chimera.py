import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import bubble, chimera, one_f_one_b, peak_activations
from tests.schedule.toy import costs, picture, step

halves, units, sizes, seconds = (
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
)


@given(halves, units, seconds, seconds)
def test_bubble_is_the_closed_form(half, number, f, b):
    num_ranks = 2 * half
    m = number * num_ranks
    measured = step(chimera(num_ranks, m), costs(f, b, 0))
    assert measured == m * (f + b) + (num_ranks - 2) * max(f, b)


@given(halves)
def test_slots_of_bubble_are_two_less_than_ranks_where_b_takes_as_long_as_f(half):
    """The figure of the paper; 1F1B has 2 (D - 1)."""
    num_ranks = 2 * half
    equal = {"forward_s": 1, "input_s": 0.5, "weights_s": 0.5}
    assert max(bubble(chimera(num_ranks, num_ranks), **equal)) == num_ranks - 2
    assert max(bubble(one_f_one_b(num_ranks, num_ranks), **equal)) == 2 * (num_ranks - 1)


@given(st.integers(1, 3), st.integers(1, 3), units, seconds, seconds)
def test_more_pipelines_shorten_the_bubble(pairs, times, number, f, b):
    num_ranks = 2 * pairs * times
    m = number * num_ranks
    measured = step(chimera(num_ranks, m, pipelines=2 * pairs), costs(f, b, 0))
    assert measured == m * (f + b) + (num_ranks // pairs - 2) * max(f, b)


@given(halves, units)
def test_rank_holds_between_half_of_the_stages_and_all(half, number):
    num_ranks = 2 * half
    held = peak_activations(chimera(num_ranks, number * num_ranks))
    assert min(held) >= half + 1
    assert number > 1 or min(held) == half + 1
    assert max(held) == num_ranks


@given(sizes, sizes, st.sampled_from((2, 4, 6)))
def test_micro_batch_goes_down_or_up(num_stages, m, pipelines):
    made = chimera(num_stages, m, pipelines=pipelines)
    for number in range(m):
        pair = number % pipelines // 2 * num_stages // (pipelines // 2)
        down = [(stage + pair) % num_stages for stage in range(num_stages)]
        up = [(num_stages - 1 - stage - pair) % num_stages for stage in range(num_stages)]
        homes = [made.rank_of(stage, number) for stage in range(num_stages)]
        assert homes == (up if number % 2 else down)


@given(sizes, sizes)
def test_step_is_never_longer_than_that_of_1f1b_by_more_than_an_odd_micro_batch(num_stages, m):
    """The busiest rank may have one action pair more than with 1F1B, if M is odd."""
    assert step(chimera(num_stages, m)) <= step(one_f_one_b(num_stages, m)) + 3 * (m % 2)


@pytest.mark.parametrize("pipelines", [0, 1, 3, -2])
def test_odd_number_of_pipelines_is_refused(pipelines):
    with pytest.raises(ScheduleError, match=f"there are {pipelines} pipelines"):
        chimera(4, 4, pipelines=pipelines)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(chimera(4, 4)) in sys.modules[chimera.__module__].__doc__
