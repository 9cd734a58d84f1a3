import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Schedule, chimera, dual_pipe, dual_pipe_v, peak_activations, zb_v
from tests.schedule.oracle import orders_of_torch
from tests.schedule.toy import costs, picture, step

ranks, sizes, seconds = st.integers(1, 6), st.integers(1, 9), st.integers(1, 9)

TORCH_CSV = Path(__file__).parent / "torch_csv"  # written by torch 2.13


@given(ranks, st.integers(0, 9), seconds, seconds, seconds)
def test_bubble_of_the_v_is_the_closed_form(num_ranks, more, f, i, w):
    w, i, f = sorted((w, i, f))
    m, f = 2 * num_ranks + more, min(f, i + w)
    measured = step(dual_pipe_v(2 * num_ranks, m), costs(f, i, w))
    assert measured == 2 * m * (f + i + w) + (num_ranks - 1) * (f + i - w)


@given(st.integers(1, 5), st.integers(0, 6), seconds, seconds, seconds)
def test_bubble_is_the_closed_form(half, more, f, i, w):
    w, i, f = sorted((w, i, f))
    m, f = 4 * half + 2 * more, min(f, i + w)
    measured = step(dual_pipe(2 * half, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (half - 1) * (f + i - w)


@given(st.integers(1, 6), st.integers(0, 6), seconds, seconds, seconds)
def test_bubble_is_no_more_than_deepseek_count(half, more, f, i, w):
    """(PP / 2 - 1) * (F&B + B - 3 W), with one after the other in F&B."""
    w, i = min(f, i, w), min(i, 2 * f)
    m, f = 4 * half + 2 * more, min(f, i + w)
    theirs = (half - 1) * ((f + i + w) + (i + w) - 3 * w)
    assert step(dual_pipe(2 * half, m), costs(f, i, w)) - m * (f + i + w) <= theirs


@given(ranks, sizes)
def test_rank_of_the_v_holds_one_activation_more_than_two_per_rank(num_ranks, m):
    assert max(peak_activations(dual_pipe_v(2 * num_ranks, m))) <= 2 * num_ranks + 1


@given(sizes, st.integers(1, 20))
def test_rank_holds_one_activation_more_than_ranks(num_stages, m):
    assert max(peak_activations(dual_pipe(num_stages, m))) <= num_stages + 1


@given(sizes, st.integers(1, 20))
def test_stage_lives_at_both_ends_as_in_chimera(num_stages, m):
    assert (dual_pipe(num_stages, m).ranks == chimera(num_stages, m).ranks).all()


@given(st.integers(1, 12), sizes)
def test_stages_of_the_v_live_where_those_of_zb_v_do(num_stages, m):
    assert (dual_pipe_v(num_stages, m).ranks == zb_v(num_stages, m).ranks).all()


@pytest.mark.parametrize(("num_ranks", "m"), [(2, 4), (2, 7), (3, 6), (4, 8), (4, 13)])
def test_v_is_the_one_of_torch(num_ranks, m):
    orders = orders_of_torch("DualPipeV", num_ranks, 2, m)
    assert dual_pipe_v(2 * num_ranks, m).orders == Schedule(2 * num_ranks, m, orders).orders


def test_more_than_two_stages_per_rank_are_refused():
    with pytest.raises(ScheduleError, match="a V of 5 stages does not fit on 2 ranks"):
        dual_pipe_v(5, 4, num_ranks=2)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(dual_pipe(4, 8)) in sys.modules[dual_pipe.__module__].__doc__
