import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import KINDS, Action, Orders, Row, arrange

numbers = st.integers(0, 999_999_999)
some_action = st.builds(Action, st.sampled_from(KINDS), numbers, numbers)
some_orders = st.lists(st.lists(some_action, max_size=6), max_size=5)


@given(some_action)
def test_action_reads_back_as_it_prints(action):
    assert Action.parse(str(action)) == action


def test_action_prints_kind_stage_and_micro_batch():
    assert str(Action("F", 2, 5)) == "F2.5"


@pytest.mark.parametrize(
    "text", ["", "F2", "F2.", "2F5", "X2.5", "f2.5", "F2.5 ", "F-1.0", "F2.5.1", "F1.\u0662"]
)
def test_text_that_is_no_action_is_refused(text):
    with pytest.raises(ScheduleError) as caught:
        Action.parse(text)
    assert caught.value.message == f"{text!r} is not an action"
    assert "F2.5" in caught.value.hint


@given(some_orders)
def test_orders_look_like_the_sequences_they_were_made_of(ranks):
    orders = Orders.of(ranks)
    assert len(orders) == len(ranks)
    assert list(orders) == [tuple(order) for order in ranks]
    assert [orders[rank] for rank in range(len(ranks))] == list(orders)
    assert all(orders[-1 - at] == orders[len(ranks) - 1 - at] for at in range(len(ranks)))
    assert orders.num_actions == sum(map(len, ranks))
    assert Orders.of(orders) is orders


@given(some_orders, some_orders)
def test_orders_are_equal_when_their_sequences_are(one, other):
    assert (Orders.of(one) == Orders.of(other)) == (one == other)
    assert Orders.of(one) == Orders.of(one)
    assert hash(Orders.of(one)) == hash(Orders.of(one))
    assert Orders.of(one) != one


@given(some_orders)
def test_every_index_leads_to_its_rank_and_action(ranks):
    orders = Orders.of(ranks)
    for rank, order in enumerate(ranks):
        part = orders.slice_of(rank)
        assert [orders.action(index) for index in range(part.start, part.stop)] == order
        assert {orders.rank_at(index) for index in range(part.start, part.stop)} <= {rank}


@pytest.mark.parametrize("rank", [2, -3])
def test_rank_that_is_not_there_is_an_index_error(rank):
    with pytest.raises(IndexError, match=f"rank {rank} of 2 ranks"):
        Orders.of([[], []])[rank]


def test_orders_print_a_line_per_rank():
    orders = Orders.of([[Action("F", 0, 0), Action("B", 0, 0)], []])
    assert str(orders) == "rank 0  F0.0 B0.0\nrank 1"
    assert repr(orders) == "Orders(2 ranks, 2 actions)"


def test_orders_come_back_from_another_process():
    orders = Orders.of([[Action("F", 0, 0)], [Action("U", 1, 2)]])
    assert pickle.loads(pickle.dumps(orders)) == orders


def test_arrays_of_the_caller_stay_writable_and_those_inside_are_not():
    kinds = np.array([0, 1], np.uint8)
    zeros = np.zeros(2, np.int32)
    orders = Orders(kinds, zeros, zeros, np.array([0, 2]))
    kinds.setflags(write=True)
    with pytest.raises(ValueError, match="read-only"):
        orders.stages[0] = 1


@pytest.mark.parametrize(
    ("kinds", "offsets", "message"),
    [
        ([0, 1], [0, 1], "do not divide"),
        ([0, 1], [1, 2], "do not divide"),
        ([0, 1], [0, 3, 2], "do not divide"),
        ([0], [0, 2], "do not divide"),
        ([0, 5], [0, 2], "code 5 is no kind"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(kinds, offsets, message):
    zeros = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=message):
        Orders(np.array(kinds, np.uint8), zeros, zeros, np.array(offsets))


@given(st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=3))
def test_rows_are_merged_by_time_and_at_one_time_row_by_row(times):
    rows = [
        Row(KINDS[stage], stage, np.arange(len(row)), np.array(sorted(row), np.int64))
        for stage, row in enumerate(times)
    ]
    merged = sorted(
        (time, stage, m) for stage, row in enumerate(times) for m, time in enumerate(sorted(row))
    )
    expected = tuple(Action(KINDS[stage], stage, m) for _, stage, m in merged)
    assert list(arrange([rows, [], rows])) == [expected, (), expected]


def test_no_rank_makes_orders_of_no_rank():
    assert len(arrange([])) == len(Orders.of([])) == 0
