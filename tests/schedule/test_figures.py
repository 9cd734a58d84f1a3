import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import (
    SCHEDULES,
    Schedule,
    bubble,
    bubble_fraction,
    one_f_one_b,
    peak_activations,
    zb_h1,
)
from tests.schedule.toy import actions

sizes, seconds = st.integers(1, 7), st.integers(1, 9)


@given(sizes, sizes)
def test_fraction_of_1f1b_is_the_known_one(num_stages, m):
    expected = (num_stages - 1) / (m + num_stages - 1)
    assert bubble_fraction(one_f_one_b(num_stages, m)) == pytest.approx(expected, abs=1e-12)


@given(st.sampled_from(SCHEDULES), sizes, sizes, seconds, seconds, seconds)
def test_fraction_is_idle_time_over_all_time(builder, num_stages, m, f, i, w):
    schedule = builder(num_stages, m)
    times = {"forward_s": f, "input_s": i, "weights_s": w}
    seconds_of = {"F": f, "B": i + w, "I": i, "W": w, "U": 0}
    work = sum(seconds_of[action.kind] for order in schedule.orders for action in order)
    idle = sum(bubble(schedule, **times))
    whole = idle + work
    assert bubble_fraction(schedule, **times) == pytest.approx(idle / whole)


def test_without_other_word_every_action_takes_a_second_and_b_is_i_and_w():
    assert bubble(one_f_one_b(2, 4)) == (3.0, 3.0)
    assert bubble(zb_h1(2, 4)) == (1.0, 1.0)


def test_work_without_time_has_no_bubble():
    times = {"forward_s": 0, "input_s": 0, "weights_s": 0}
    assert bubble_fraction(one_f_one_b(2, 4), **times) == 0


def test_forwards_alone_hold_no_activation():
    schedule = Schedule(2, 2, (actions("F0.0 F0.1"), actions("F1.0 F1.1")))
    assert peak_activations(schedule) == (0, 0)


def test_activations_are_held_until_the_weights_are_done():
    schedule = Schedule(1, 2, (actions("F0.0 I0.0 F0.1 I0.1 W0.1 W0.0"),))
    assert peak_activations(schedule) == (2,)
