import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import layer_pipe, one_f_one_b, peak_activations
from tests.schedule.brute import seconds_of
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_the_closed_form(num_stages, m, f, i, w):
    measured = step(layer_pipe(num_stages, m), costs(f, i, w))
    assert measured == m * (f + i + w) + (num_stages - 1) * (f + i)


@given(sizes, sizes)
def test_rank_holds_one_activation_more_than_with_1f1b(num_stages, m):
    held = tuple(min(num_stages - rank + 1, m) for rank in range(num_stages))
    assert peak_activations(layer_pipe(num_stages, m)) == held


@given(sizes, sizes)
def test_gradient_of_the_weights_waits_for_one_forward(num_stages, m):
    for order in layer_pipe(num_stages, m).orders:
        words = "".join(action.kind for action in order)
        assert words.replace("IFW", "").replace("IW", "").strip("F") == ""


@given(st.data(), sizes, sizes)
def test_step_is_never_longer_than_with_whole_backwards_whatever_stages_take(data, num_stages, m):
    row = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    times = data.draw(st.tuples(row, row, row))
    ours, whole = (
        [tuple((action.kind, action.micro_batch) for action in order) for order in made.orders]
        for made in (layer_pipe(num_stages, m), one_f_one_b(num_stages, m))
    )
    assert seconds_of(ours, times) <= seconds_of(whole, times)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(layer_pipe(3, 4)) in sys.modules[layer_pipe.__module__].__doc__
