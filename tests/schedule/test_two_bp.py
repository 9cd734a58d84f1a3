import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    delay_weights,
    double_buffered,
    forward_only,
    one_f_one_b,
    peak_activations,
    two_bp,
    zb_h1,
)
from tests.schedule.toy import costs, picture, step

sizes, seconds = st.integers(1, 7), st.integers(1, 9)
synchronous = st.sampled_from([b for b in SCHEDULES if not b(2, 2).has_updates])


@given(sizes, sizes, seconds, seconds, seconds)
def test_bubble_is_that_of_h1(num_stages, more, f, i, w):
    m, w = num_stages + more, min(f, i, w)
    for limit in (None, num_stages, num_stages + 2):
        measured = step(two_bp(num_stages, m, limit=limit), costs(f, i, w))
        assert measured == m * (f + i + w) + (num_stages - 1) * (f + i - w)
        assert measured == step(zb_h1(num_stages, m), costs(f, i, w))


@given(sizes, sizes)
def test_every_rank_holds_all_activations_or_as_many_as_allowed(num_stages, m):
    assert peak_activations(two_bp(num_stages, m)) == (m,) * num_stages
    assert max(peak_activations(two_bp(num_stages, m, limit=num_stages))) <= num_stages


def kept(schedule):
    """Return the F and I, or B, of every rank, in their order."""
    names = {"F": "F", "B": "I", "I": "I"}
    return [[(names[k], s, m) for k, s, m in order if k in names] for order in schedule.orders]


@given(synchronous, sizes, sizes, st.integers(1, 4))
def test_forwards_and_gradients_keep_their_order_on_top_of_any_schedule(builder, num_stages, m, n):
    given_ = builder(num_stages, m)
    delayed = delay_weights(given_, batch=n)
    assert kept(delayed) == kept(given_)
    assert (delayed.ranks == given_.ranks).all()
    assert builder is forward_only or {a.kind for o in delayed.orders for a in o} <= set("FIW")


@given(synchronous, sizes, sizes, st.tuples(seconds, seconds, seconds))
def test_step_is_never_longer_than_with_whole_backwards(builder, num_stages, m, fiw):
    """Given the seconds that there are; I is sent before W."""
    given_ = builder(num_stages, m)
    if any(action.kind == "I" for order in given_.orders for action in order):
        return
    from penstock.schedule import Seconds

    assert step(delay_weights(given_, seconds=Seconds(*fiw)), costs(*fiw)) <= step(
        given_, costs(*fiw)
    )


@given(sizes, sizes, st.integers(1, 5))
def test_weights_are_done_in_batches(num_stages, m, batch):
    for order in delay_weights(one_f_one_b(num_stages, m), batch=batch).orders:
        places = [place for place, action in enumerate(order) if action.kind == "W"]
        for first in range(0, m, batch):
            some = places[first : first + batch]
            assert some == list(range(some[0], some[0] + len(some)))


@given(sizes, sizes, st.integers(1, 5))
def test_batches_hold_no_more_than_their_size_above_the_limit(num_stages, m, batch):
    made = delay_weights(one_f_one_b(num_stages, m), limit=num_stages, batch=batch)
    assert max(peak_activations(made)) <= num_stages + batch - 1


def test_what_cannot_be_delayed_is_refused():
    with pytest.raises(ScheduleError, match="the schedule lists updates"):
        delay_weights(double_buffered(2, 2))
    with pytest.raises(ScheduleError, match="batch is 0"):
        delay_weights(one_f_one_b(2, 2), batch=0)
    with pytest.raises(ScheduleError, match="the limit is too low for this order"):
        two_bp(3, 4, limit=2)


def test_schedule_without_backward_is_left_as_it_is():
    assert delay_weights(forward_only(2, 3)) == forward_only(2, 3)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(two_bp(3, 4)) in sys.modules[two_bp.__module__].__doc__
