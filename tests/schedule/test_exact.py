"""Exact: the shortest, with a bound that says so; and how near to it the greedy comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import Seconds, peak_activations
from penstock.schedule.exact import exact
from penstock.schedule.improve import step_of
from penstock.schedule.zb_greedy import best_of_rules
from tests.draws import examples
from tests.schedule.brute import seconds_of, shortest
from tests.schedule.test_improve import plain, unequal

tiny = st.sampled_from(((1, 4), (2, 2), (2, 3), (3, 2)))


@given(tiny, st.data(), st.integers(1, 6))
@examples(20)
def test_step_is_the_shortest_there_is_and_is_proved(size, data, limit):
    times = data.draw(unequal(size[0]))
    found = exact(*size, seconds=Seconds(*times), limit=limit)
    assert found.is_proved
    assert found.step_s == pytest.approx(shortest(*size, times, limit=limit, split=True))
    assert found.bound_s <= found.step_s
    assert seconds_of(plain(found.schedule.orders), times) == found.step_s
    assert max(peak_activations(found.schedule)) <= limit


@given(tiny, st.data(), st.integers(1, 2))
@examples(6)
def test_actions_that_take_no_time_are_solved_too(size, data, limit):
    """As I of a first stage, whose input has no gradient."""
    row = st.lists(st.integers(0, 2), min_size=size[0], max_size=size[0]).map(tuple)
    times = data.draw(st.tuples(row, row, row))
    found = exact(*size, seconds=Seconds(*times), limit=limit)
    assert found.is_proved
    assert found.step_s == shortest(*size, times, limit=limit, split=True)


@given(st.integers(2, 4), st.integers(0, 4), st.integers(-3, 3), st.data())
@examples(10)
def test_greedy_is_near_the_optimum_wherever_that_is_proved(num_stages, more, room, data):
    """With less memory than 1F1B and more, for stages as they are: I and W about as long as F."""
    f, i, w = (data.draw(st.integers(*span)) for span in ((8, 12), (8, 16), (5, 14)))
    seconds, m = Seconds(f, i, w, data.draw(st.integers(0, 2))), num_stages + more
    limit = max(1, num_stages + room)
    found = exact(num_stages, m, seconds=seconds, limit=limit, time_limit_s=5)
    greedy = best_of_rules(num_stages, m, seconds, limit)
    step_s = step_of(greedy.orders, seconds, (num_stages, m))
    assert found.bound_s <= found.step_s <= step_s
    assert not found.is_proved or step_s <= 1.017 * found.step_s


def test_without_time_the_greedy_schedule_comes_back_with_a_bound():
    seconds = Seconds(9, 15, 13)
    found = exact(6, 9, seconds=seconds, limit=5, time_limit_s=0.0)
    greedy = best_of_rules(6, 9, seconds, 5)
    assert found.schedule.orders == greedy.orders
    assert found.bound_s <= found.step_s == step_of(greedy.orders, seconds, (6, 9))
    assert not found.is_proved


def test_no_activation_at_all_is_refused():
    with pytest.raises(ScheduleError, match="may hold 0 activations"):
        exact(2, 2, limit=0)
