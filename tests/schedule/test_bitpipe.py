import sys

from hypothesis import given
from hypothesis import strategies as st

from penstock.program.lower import lower
from penstock.schedule import bitpipe, bubble, chimera, interleaved, peak_activations
from tests.schedule.toy import costs, picture, step

halves, units, sizes, seconds = (
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 9),
)


@given(halves, units, seconds, seconds)
def test_bubble_is_the_closed_form(half, number, f, b):
    num_ranks = 2 * half
    m = number * num_ranks
    measured = step(bitpipe(2 * num_ranks, m), costs(f, b, 0))
    assert measured == 2 * m * (f + b) + (num_ranks - 2) * max(f, b)


@given(halves, units, seconds, seconds)
def test_bubble_is_half_of_that_of_chimera_and_less_than_that_of_interleaved(half, number, f, b):
    """Stages are half as long as those of Chimera on as many ranks."""
    num_ranks = 2 * half
    m = number * num_ranks
    work = 2 * m * (f + b)
    ours = step(bitpipe(2 * num_ranks, m), costs(f, b, 0)) - work
    assert 2 * ours == step(chimera(num_ranks, m), costs(2 * f, 2 * b, 0)) - work
    if f <= b <= 2 * f:
        assert (
            ours < step(interleaved(2 * num_ranks, m, num_ranks=num_ranks), costs(f, b, 0)) - work
        )


@given(halves, units)
def test_rank_holds_two_activations_per_rank_at_most(half, number):
    num_ranks = 2 * half
    assert max(peak_activations(bitpipe(2 * num_ranks, number * num_ranks))) <= 2 * num_ranks


@given(sizes, sizes, st.integers(1, 5))
def test_odd_micro_batches_come_from_the_other_end(num_stages, m, num_ranks):
    num_stages = min(num_stages, 2 * num_ranks)
    made = bitpipe(num_stages, m, num_ranks=num_ranks)
    for stage in range(num_stages):
        down = stage if stage < num_ranks else 2 * num_ranks - 1 - stage
        for number in range(m):
            home = num_ranks - 1 - down if number % 2 else down
            assert made.rank_of(stage, number) == home


@given(halves, units)
def test_messages_are_fewer_by_the_turns(half, number):
    num_ranks = 2 * half
    m = number * num_ranks
    messages = sum(
        type(each).__name__ == "Send"
        for code in lower(bitpipe(2 * num_ranks, m)).code
        for each in code
    )
    loop = interleaved(2 * num_ranks, m, num_ranks=num_ranks)
    of_loop = sum(type(each).__name__ == "Send" for code in lower(loop).code for each in code)
    assert messages == of_loop - 2 * m  # one forward and one backward each stay on their rank


def test_picture_in_the_docstring_is_what_runs():
    made = bitpipe(4, 2)
    assert picture(made, costs(1, 1, 0), stages=True) in sys.modules[bitpipe.__module__].__doc__
    assert bubble(made) == (0, 0)
