import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import one_f_one_b, peak_activations, zb_h1
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    w = min(f, i, w)
    measured = step(zb_h1(num_stages, m), costs(f, i, w))
    saved = (min(num_stages, m) - 1) * w
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i) - saved


@given(sizes, st.integers(0, 9), seconds, seconds, seconds)
def test_bubble_is_two_w_per_rank_less_than_that_of_1f1b(num_stages, more, f, i, w):
    m, w = num_stages + more, min(f, i, w)
    ours = step(zb_h1(num_stages, m), costs(f, i, w))
    assert ours == step(one_f_one_b(num_stages, m), costs(f, i, w)) - 2 * w * (num_stages - 1)


@given(sizes, sizes)
def test_every_rank_holds_as_many_activations_as_the_first_of_1f1b(num_stages, m):
    assert peak_activations(zb_h1(num_stages, m)) == (min(num_stages, m),) * num_stages


@given(sizes, sizes)
def test_weights_trail_by_one_micro_batch_per_rank(num_stages, m):
    for rank, order in enumerate(zb_h1(num_stages, m).orders):
        inputs = 0
        for action in order:
            inputs += action.kind == "I"
            if action.kind == "W":
                assert inputs == min(action.micro_batch + rank + 1, m)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(zb_h1(3, 4)) in sys.modules[zb_h1.__module__].__doc__
