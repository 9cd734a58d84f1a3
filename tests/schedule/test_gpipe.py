import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import gpipe, peak_activations
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    measured = step(gpipe(num_stages, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i + w)


@given(sizes, sizes)
def test_every_rank_runs_all_forwards_before_the_first_backward(num_stages, m):
    for rank, order in enumerate(gpipe(num_stages, m).orders):
        words = [f"F{rank}.{n}" for n in range(m)] + [f"B{rank}.{n}" for n in range(m)]
        assert list(map(str, order)) == words


@given(sizes, sizes)
def test_every_rank_holds_all_activations(num_stages, m):
    assert peak_activations(gpipe(num_stages, m)) == (m,) * num_stages


def test_picture_in_the_docstring_is_what_runs():
    assert picture(gpipe(3, 4)) in sys.modules[gpipe.__module__].__doc__
