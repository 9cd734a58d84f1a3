import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import forward_only, gpipe, peak_activations
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 9), st.integers(1, 9)


@given(sizes, sizes, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f):
    assert step(forward_only(num_stages, m), costs(f, 1, 1)) == (m + num_stages - 1) * f


@given(sizes, sizes)
def test_it_is_gpipe_without_backwards_and_holds_nothing(num_stages, m):
    made = forward_only(num_stages, m)
    for mine, other in zip(made.orders, gpipe(num_stages, m).orders, strict=True):
        assert mine == other[:m]
    assert peak_activations(made) == (0,) * num_stages


def test_picture_in_the_docstring_is_what_runs():
    assert picture(forward_only(3, 4)) in sys.modules[forward_only.__module__].__doc__
