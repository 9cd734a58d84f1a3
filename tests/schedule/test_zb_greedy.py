import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Seconds, one_f_one_b, peak_activations, zb_greedy, zb_h1, zb_h2
from tests.schedule.brute import shortest
from tests.schedule.toy import costs, picture, simulated, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)
tiny = st.sampled_from(((1, 4), (2, 2), (2, 3), (3, 2)))
times = st.tuples(seconds, seconds, seconds)


@given(tiny, times, st.integers(1, 5))
def test_step_is_the_shortest_there_is_for_the_tiniest_sizes(size, fiw, limit):
    (num_stages, m), rows = size, [(each,) * size[0] for each in fiw]
    ours = step(zb_greedy(num_stages, m, seconds=Seconds(*fiw), limit=limit), costs(*fiw))
    assert ours == shortest(num_stages, m, rows, limit=limit, split=True)


@given(sizes, st.integers(1, 16), times, st.integers(0, 7))
def test_step_is_never_longer_than_those_of_h1_and_h2_within_their_memory(num_stages, m, fiw, more):
    limit = num_stages + more
    ours = step(zb_greedy(num_stages, m, seconds=Seconds(*fiw), limit=limit), costs(*fiw))
    for builder in (zb_h1, zb_h2):
        if max(peak_activations(builder(num_stages, m))) <= limit:
            assert ours <= step(builder(num_stages, m), costs(*fiw))
    assert ours <= step(one_f_one_b(num_stages, m), costs(*fiw))


@given(sizes, st.integers(1, 16), times, st.integers(1, 12), st.integers(0, 4))
def test_rank_holds_no_more_than_the_limit(num_stages, m, fiw, limit, message_s):
    made = zb_greedy(num_stages, m, seconds=Seconds(*fiw, message_s), limit=limit)
    assert max(peak_activations(made)) <= limit


@given(sizes, st.integers(1, 16))
def test_without_other_word_it_is_as_good_as_h1_in_the_memory_of_1f1b(num_stages, m):
    made = zb_greedy(num_stages, m)
    assert max(peak_activations(made)) <= num_stages
    assert step(made) == step(zb_h1(num_stages, m))


@given(st.integers(2, 6), st.integers(0, 9), times, st.integers(1, 3))
def test_seconds_of_messages_are_minded(num_stages, more, fiw, message_s):
    """Made for the messages there are, it is no slower with them than ZB-H2, that ignores them."""
    m = 2 * num_stages + more
    seconds = Seconds(*fiw, message_s)
    ours = zb_greedy(num_stages, m, seconds=seconds, limit=2 * num_stages - 1)
    h2 = simulated(zb_h2(num_stages, m), costs(*fiw), message_s=message_s)
    assert simulated(ours, costs(*fiw), message_s=message_s) <= h2


@pytest.mark.parametrize(
    ("size", "fiw", "limit", "least_s"),
    [
        ((3, 5), (11, 10, 9), 2, 216),
        ((4, 7), (11, 14, 10), 3, 330),
        ((6, 7), (12, 12, 11), 3, 465),
        ((6, 9), (10, 15, 10), 5, 425),  # from the second or third best start
    ],
)
def test_step_is_the_shortest_with_less_memory_than_1f1b_has(size, fiw, limit, least_s):
    """Where the groups of `limit` micro-batches do not come out even."""
    assert step(zb_greedy(*size, seconds=Seconds(*fiw), limit=limit), costs(*fiw)) == least_s


def test_no_activation_at_all_is_refused():
    with pytest.raises(ScheduleError, match="rank 0 may hold 0 activations, and has 1 stages"):
        zb_greedy(2, 2, limit=0)


def test_picture_in_the_docstring_is_what_runs():
    made = zb_greedy(3, 4, seconds=Seconds(1, 2, 1))
    assert picture(made, costs(1, 2, 1)) in sys.modules[zb_greedy.__module__].__doc__
