import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import one_f_one_b, peak_activations, v_half, v_min, zb_v
from tests.schedule.toy import costs, picture, step

ranks, sizes = st.integers(1, 10), st.integers(1, 15)


@given(ranks, sizes)
def test_rank_of_v_min_holds_a_third_of_1f1b(num_ranks, m):
    held = max(peak_activations(v_min(2 * num_ranks, m)))
    assert held <= 2 * ((num_ranks + 4) // 3)
    assert held <= 2 * num_ranks / 3 + 8 / 3
    assert m < num_ranks or held == 2 * ((num_ranks + 4) // 3)


@given(ranks, sizes)
def test_rank_of_v_half_holds_a_half_of_1f1b(num_ranks, m):
    held = max(peak_activations(v_half(2 * num_ranks, m)))
    assert held <= num_ranks + 1 + (num_ranks % 2 == 0)


@given(st.integers(3, 10), sizes)
def test_bubbles_are_the_closed_forms(num_ranks, more):
    m = num_ranks + more - 1
    third = 6 * num_ranks - 1 - 6 * ((num_ranks + 4) // 3)
    half = 3 * num_ranks - 7 + 3 * (num_ranks % 2)
    assert step(v_min(2 * num_ranks, m)) == 6 * m + third
    assert step(v_half(2 * num_ranks, m)) == 6 * m + half


@pytest.mark.parametrize(
    ("builder", "num_ranks", "published"),
    [(v_half, 4, 53), (v_half, 6, 83), (v_min, 3, 41), (v_min, 6, 89), (v_min, 5, 75)],
)
def test_no_step_is_longer_than_that_of_the_authors(builder, num_ranks, published):
    assert step(builder(2 * num_ranks, 2 * num_ranks)) <= published


@given(st.integers(3, 6), st.integers(1, 6))
def test_less_memory_costs_time_and_less_than_1f1b_does(num_ranks, more):
    m = 2 * num_ranks - 1 + more
    builders = (zb_v, v_half, v_min)
    steps = [step(builder(2 * num_ranks, m)) for builder in builders]
    held = [max(peak_activations(builder(2 * num_ranks, m))) for builder in builders]
    assert steps == sorted(steps)
    assert held == sorted(held, reverse=True)
    assert steps[-1] < step(one_f_one_b(num_ranks, m), costs(2, 2, 2)) == 6 * (m + num_ranks - 1)


@pytest.mark.parametrize("builder", [v_half, v_min])
@given(num_stages=sizes, m=sizes, num_ranks=ranks)
def test_any_v_builds_and_more_than_two_stages_per_rank_are_refused(
    builder, num_stages, m, num_ranks
):
    if num_stages <= 2 * num_ranks:
        made = builder(num_stages, m, num_ranks=num_ranks)
        there = list(range(num_ranks))
        assert made.stage_ranks == tuple((home,) for home in (there + there[::-1])[:num_stages])
    else:
        with pytest.raises(ScheduleError, match="does not fit"):
            builder(num_stages, m, num_ranks=num_ranks)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(v_min(4, 2), stages=True) in sys.modules[v_min.__module__].__doc__
