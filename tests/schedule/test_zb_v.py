import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Schedule, Seconds, one_f_one_b, peak_activations, steady_s, zb_v
from tests.schedule.oracle import orders_of_torch
from tests.schedule.toy import picture, step

ranks, sizes, seconds = st.integers(1, 9), st.integers(1, 12), st.integers(1, 9)

NEAR = 1 + 1e-12
TORCH_CSV = Path(__file__).parent / "torch_csv"  # written by torch 2.13


@given(ranks, st.integers(0, 12))
def test_bubble_is_the_time_until_the_last_rank_can_start(num_ranks, more):
    for m in (num_ranks, 2 * num_ranks - 1 + more):
        assert step(zb_v(2 * num_ranks, m)) == 6 * m + num_ranks - 1


@given(ranks, sizes)
def test_rank_holds_no_more_than_the_first_one_of_1f1b(num_ranks, m):
    held = max(peak_activations(zb_v(2 * num_ranks, m)))
    assert held <= 2 * num_ranks
    assert held <= max(2, 2 * max(peak_activations(one_f_one_b(num_ranks, m))))


@given(ranks, st.integers(0, 12))
def test_no_rank_waits_in_a_long_run(num_ranks, more):
    m = 2 * num_ranks - 1 + more
    assert steady_s(zb_v(2 * num_ranks, m)) == 6 * m


@given(st.integers(1, 6), sizes, seconds, seconds, seconds)
def test_step_is_never_longer_than_that_of_1f1b_or_the_one_for_equal_stages(
    num_ranks, more, f, i, w
):
    """In a long run, made for the seconds that there are; stages of 1F1B are twice as large."""
    m, times = num_ranks + more, Seconds(f, i, w)
    ours = steady_s(zb_v(2 * num_ranks, m, seconds=times), times)
    assert ours <= steady_s(one_f_one_b(num_ranks, m), Seconds(2 * f, 2 * i, 2 * w)) * NEAR
    assert ours <= steady_s(zb_v(2 * num_ranks, m), times) * NEAR


def test_nor_where_the_search_for_these_seconds_finds_less():
    times = Seconds((8, 4, 1, 9, 6, 6), 2, (2, 7, 1, 8, 2, 1))
    assert steady_s(zb_v(6, 6, seconds=times), times) <= steady_s(zb_v(6, 6), times) * NEAR


@pytest.mark.parametrize(("num_ranks", "m"), [(2, 4), (3, 6), (4, 8)])
def test_actions_are_those_of_torch_on_the_same_ranks_and_take_no_longer(num_ranks, m):
    """torch does some B whole."""
    theirs = Schedule(2 * num_ranks, m, orders_of_torch("ZBVZeroBubble", num_ranks, 2, m))
    ours = zb_v(2 * num_ranks, m)
    assert ours.stage_ranks == theirs.stage_ranks
    assert step(ours) <= step(theirs)
    assert max(peak_activations(ours)) <= max(peak_activations(theirs))


@given(sizes, sizes, ranks)
def test_fewer_stages_than_two_per_rank_leave_the_v_short(num_stages, m, num_ranks):
    if num_stages <= 2 * num_ranks:
        made = zb_v(num_stages, m, num_ranks=num_ranks)
        there = list(range(num_ranks))
        assert made.stage_ranks == tuple((home,) for home in (there + there[::-1])[:num_stages])
    else:
        with pytest.raises(ScheduleError, match="does not fit"):
            zb_v(num_stages, m, num_ranks=num_ranks)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(zb_v(4, 2), stages=True) in sys.modules[zb_v.__module__].__doc__
