import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Row,
    Schedule,
    arrange,
    bubble,
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


@given(synchronous, sizes, sizes)
def test_forwards_and_gradients_keep_their_order_on_top_of_any_schedule(builder, num_stages, m):
    given_ = builder(num_stages, m)
    delayed = delay_weights(given_)
    assert kept(delayed) == kept(given_)
    assert (delayed.ranks == given_.ranks).all()
    assert builder is forward_only or {a.kind for o in delayed.orders for a in o} <= set("FIW")


def test_backwards_out_of_order_are_refused_by_what_they_are():
    m = np.arange(3)
    order = arrange([(Row("F", 0, m, m), Row("B", 0, m[::-1], 3 + m))])
    with pytest.raises(ScheduleError, match="out of order") as refusal:
        delay_weights(Schedule(1, 3, order, name="last_first"))
    assert "limit" not in refusal.value.hint


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


@given(sizes, st.integers(1, 4), st.integers(1, 5), st.sampled_from((None, 2)))
def test_weights_of_a_batch_are_one_action_after_the_last_of_its_inputs(stages, more, batch, limit):
    limit = limit and limit * stages
    made = two_bp(stages, more * batch, limit=limit, batch=batch)
    assert kept(made) == kept(one_f_one_b(stages, more * batch))
    assert made.together == batch
    for order in made.orders:
        weights = [action.micro_batch for action in order if action.kind == "W"]
        assert weights == list(range(0, more * batch, batch))
        for first in weights:
            at = order.index(("W", order[0].stage, first))
            assert ("I", order[0].stage, first + batch - 1) in order[:at]
    most = more * batch if limit is None else limit + batch - 1
    assert max(peak_activations(made)) <= most


@given(sizes, st.integers(1, 4), st.integers(2, 4), seconds, seconds, seconds)
def test_a_batch_takes_as_long_as_its_parts_and_the_step_no_less(stages, more, batch, f, i, w):
    """A step of S ranks is at least the work of one, and the last batch ends it."""
    m = more * batch
    apart, made = two_bp(stages, m), two_bp(stages, m, batch=batch)
    one, all_ = ((f, i + w, i, each, 0) for each in (w, batch * w))
    assert made.play(all_)[1].max() >= m * (f + i + w)
    assert made.play(all_)[1].max() >= apart.play(one)[1].max()
    assert bubble(made, forward_s=f, input_s=i, weights_s=w) == tuple(
        made.play(all_)[1].max() - m * (f + i + w) for _ in range(stages)
    )


def test_what_cannot_be_delayed_is_refused():
    with pytest.raises(ScheduleError, match="the schedule lists updates"):
        delay_weights(double_buffered(2, 2))
    with pytest.raises(ScheduleError, match="batch is 0"):
        delay_weights(one_f_one_b(2, 2), batch=0)
    with pytest.raises(ScheduleError, match="4 micro-batches cannot go 3 together"):
        two_bp(2, 4, batch=3)
    with pytest.raises(ScheduleError, match="has backwards of 2 micro-batches"):
        delay_weights(two_bp(2, 4, batch=2))
    with pytest.raises(ScheduleError, match="the limit is too low for this order"):
        two_bp(3, 4, limit=2)


def test_schedule_without_backward_is_left_as_it_is():
    assert delay_weights(forward_only(2, 3)) == forward_only(2, 3)


def test_picture_in_the_docstring_is_what_runs():
    assert picture(two_bp(3, 4)) in sys.modules[two_bp.__module__].__doc__
