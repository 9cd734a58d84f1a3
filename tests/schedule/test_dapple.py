import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import dapple, one_f_one_b, peak_activations
from tests.schedule.toy import costs, picture, simulated, step

sizes, seconds = st.integers(1, 8), st.integers(1, 9)
policies = st.sampled_from(("A", "B"))


@given(sizes, sizes, seconds, seconds, policies)
def test_bubble_is_that_of_1f1b(num_stages, m, f, b, policy):
    measured = step(dapple(num_stages, m, policy=policy), costs(f, b, 0))
    assert measured == m * (f + b) + (num_stages - 1) * (f + b)


@given(sizes, sizes)
def test_policy_a_is_1f1b(num_stages, m):
    assert dapple(num_stages, m, policy="A").orders == one_f_one_b(num_stages, m).orders


@given(sizes, sizes)
def test_rank_holds_its_warm_up(num_stages, m):
    behind = range(num_stages, 0, -1)
    assert peak_activations(dapple(num_stages, m)) == tuple(min(2 * k - 1, m) for k in behind)


@given(sizes, sizes, sizes, st.sampled_from("AB"))
def test_no_rank_holds_more_than_the_limit(num_stages, m, limit, policy):
    free = peak_activations(dapple(num_stages, m, policy=policy))
    held = peak_activations(dapple(num_stages, m, policy=policy, limit=limit))
    assert held == tuple(min(limit, each) for each in free)


def test_limit_of_none_is_refused():
    with pytest.raises(ScheduleError, match="the limit is 0 activations"):
        dapple(2, 2, limit=0)


@given(sizes, sizes, st.integers(0, 9))
def test_more_warm_up_is_never_slower_whatever_messages_take(num_stages, m, message_s):
    slower = simulated(one_f_one_b(num_stages, m), message_s=message_s)
    assert simulated(dapple(num_stages, m), message_s=message_s) <= slower


@given(sizes, sizes, seconds, seconds, st.integers(0, 9))
def test_steps_with_messages_are_bapipe_s_closed_forms(n, m, f, b, message_s):
    """AS <= SNO as we run it <= SNO where computes wait for messages; SO is exact, if they fit."""
    work = (m + n - 1) * (f + b)
    waits = simulated(one_f_one_b(n, m), costs(f, b, 0), message_s=message_s)
    assert work <= waits <= work + 2 * (m + n - 2) * message_s
    hides = simulated(dapple(n, m), costs(f, b, 0), message_s=message_s)
    assert hides >= work + 2 * (n - 1) * message_s
    if 2 * message_s <= f + b:
        assert hides == work + 2 * (n - 1) * message_s


def test_picture_in_the_docstring_is_what_runs():
    assert picture(dapple(3, 5)) in sys.modules[dapple.__module__].__doc__
