"""Improve: orders of other schedules, never longer, within the limit, and no two alike swapped."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.schedule import Schedule, Seconds, peak_activations, two_bp, zb_h1, zb_h2
from penstock.schedule.greedy import Result
from penstock.schedule.improve import improve, step_of
from tests.schedule.brute import seconds_of, shortest
from tests.schedule.toy import costs, simulated, step

sizes, seconds = st.integers(1, 6), st.integers(1, 9)
builders = st.sampled_from((zb_h1, zb_h2))


@st.composite
def unequal(draw, num_stages):
    row = st.lists(seconds, min_size=num_stages, max_size=num_stages)
    return tuple(draw(row) for _ in range(3))


def plain(orders):
    return [tuple((action.kind, action.micro_batch) for action in order) for order in orders]


@given(builders, sizes, sizes, st.data())
def test_step_is_never_longer_and_is_the_one_that_is_told(builder, num_stages, m, data):
    times = data.draw(unequal(num_stages))
    made = builder(num_stages, m)
    before_s = seconds_of(plain(made.orders), times)
    given_ = Result(made.orders, before_s)
    found = improve(given_, Seconds(*times), (num_stages, m), limit=m)
    better = Schedule(num_stages, m, found.orders)  # complete, and runs to its end
    assert found.step_s <= before_s
    assert seconds_of(plain(better.orders), times) == found.step_s


@given(st.integers(2, 6), sizes, st.data(), st.integers(0, 2))
def test_rank_holds_no_more_than_the_limit(num_stages, more, data, room):
    m, limit = num_stages + more, num_stages + room
    made = two_bp(num_stages, m, limit=limit)
    seconds = Seconds(*data.draw(unequal(num_stages)))
    given_ = Result(made.orders, step_of(made.orders, seconds, (num_stages, m)))
    found = improve(given_, seconds, (num_stages, m), limit)
    assert max(peak_activations(Schedule(num_stages, m, found.orders))) <= limit


@given(builders, sizes, sizes, st.tuples(seconds, seconds, seconds), st.integers(0, 3))
def test_step_is_what_the_simulator_says(builder, num_stages, m, fiw, message_s):
    f, i, w = fiw
    made = builder(num_stages, m)
    told = step_of(made.orders, Seconds(f, i, w, message_s), (num_stages, m))
    assert told == simulated(made, costs(f, i, w), message_s=message_s)
    assert message_s or told == step(made, costs(f, i, w))


@given(st.sampled_from(((2, 3), (3, 2))), st.data())
def test_tiny_orders_come_near_to_the_shortest(size, data):
    """From anywhere: here ZB-H1, whose W are where f = i = w wants them."""
    times = data.draw(unequal(size[0]))
    made = zb_h1(*size)
    given_ = Result(made.orders, seconds_of(plain(made.orders), times))
    found = improve(given_, Seconds(*times), size, limit=size[0])
    assert found.step_s <= 1.1 * shortest(*size, times, limit=size[0], split=True)


def test_schedule_that_cannot_be_shorter_is_left_as_it_is():
    made = Result(zb_h1(3, 6).orders, 20.0)
    assert improve(made, Seconds(), (3, 6), limit=3) is made


def test_same_orders_come_out_each_time():
    seconds = Seconds((3, 5, 3, 2), (5, 9, 3, 5), (2, 2, 6, 8), 1)
    made = zb_h1(4, 6)
    given_ = Result(made.orders, step_of(made.orders, seconds, (4, 6)))
    first, second = (improve(given_, seconds, (4, 6), limit=4) for _ in range(2))
    assert first.orders == second.orders
    assert (given_.step_s, first.step_s) == (116.0, 104.0)
