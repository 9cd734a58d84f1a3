"""What a schedule refuses to be, and what it says then."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    DOUBLE_BUFFERED,
    Action,
    Orders,
    Reads,
    Schedule,
    WeightRule,
    double_buffered,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
)
from tests.schedule.toy import actions, is_valid


def refused(text: str, num_stages: int, m: int, **others) -> tuple[str, str]:
    orders = tuple(actions(line) for line in text.splitlines())
    with pytest.raises(ScheduleError) as caught:
        Schedule(num_stages, m, orders, **others)
    return caught.value.message, caught.value.hint


def test_two_ranks_that_wait_for_each_other_are_shown():
    message, hint = refused("F0.0 B0.0 F0.1 B0.1\nF1.1 B1.1 F1.0 B1.0", 2, 2)
    assert message == (
        "rank 0 stops at B0.0: it waits for B1.0, which waits for it\n"
        "  rank 0  F0.0 B0.0 F0.1 B0.1\n"
        "  rank 1  F1.1 B1.1 F1.0 B1.0"
    )
    assert hint == "give neighbouring stages their micro-batches in the same order"


def test_rank_that_waits_for_itself_is_shown():
    message, hint = refused("F0.0 F0.1 B0.0 B0.1\nB1.0 F1.0 F1.1 B1.1", 2, 2)
    assert message == (
        "rank 1 stops at B1.0: it waits for F1.0, which waits for it\n  rank 1  B1.0 F1.0 F1.1 B1.1"
    )
    assert hint == "put F1.0 before B1.0 on rank 1"


def test_three_ranks_that_wait_in_a_circle_are_shown_and_a_fourth_is_not():
    message, _ = refused("F4.0\nF2.0\nF3.0 F0.0\nF1.0", 5, 1)
    assert message == (
        "rank 1 stops at F2.0: it waits for F1.0, which waits for F0.0, which waits for it\n"
        "  rank 1  F2.0\n"
        "  rank 3  F1.0\n"
        "  rank 2  F3.0 F0.0"
    )


def test_long_circle_is_shortened_to_eight_ranks():
    lines = ["F12.0 F0.0", *(f"F{stage}.0" for stage in range(1, 12))]
    head, *rest = refused("\n".join(lines), 13, 1)[0].splitlines()
    waits = [f"F{stage}.0" for stage in range(11, 4, -1)] + ["...", "F1.0", "it"]
    chain = ", which waits for ".join(waits)
    assert head == f"rank 0 stops at F12.0: it waits for {chain}"
    assert rest[0] == "  rank 0  F12.0 F0.0"
    assert rest[1:8] == [f"  rank {rank}  F{rank}.0" for rank in range(11, 4, -1)]
    assert rest[8:] == ["  ... and 4 more ranks"]


def test_circle_in_a_big_schedule_is_found():
    orders = one_f_one_b(64, 256).orders
    micro_batches = np.array(orders.micro_batches)
    last = micro_batches[orders.slice_of(63)]
    last[:6] = [2, 2, 1, 1, 0, 0]
    with pytest.raises(ScheduleError) as caught:
        Schedule(64, 256, Orders(orders.kinds, orders.stages, micro_batches, orders.offsets))
    assert caught.value.message == (
        "rank 62 stops at B62.0: it waits for B63.0, which waits for it\n"
        "  rank 62  F62.0 F62.1 B62.0 F62.2 B62.1 F62.3 B62.2 ...\n"
        "  rank 63  F63.2 B63.2 F63.1 B63.1 F63.0 ..."
    )


def test_long_order_is_shown_around_the_place():
    orders = [list(order) for order in gpipe(2, 10).orders]
    orders[1].remove(Action("F", 1, 5))
    orders[1].append(Action("F", 1, 5))
    with pytest.raises(ScheduleError) as caught:
        Schedule(2, 10, Orders.of(orders))
    assert caught.value.message == (
        "rank 1 stops at B1.5: it waits for F1.5, which waits for it\n"
        "  rank 1  ... B1.1 B1.2 B1.3 B1.4 B1.5 B1.6 B1.7 B1.8 B1.9 ..."
    )


def test_weights_before_their_input_wait_for_ever():
    message, hint = refused("F0.0 W0.0 I0.0", 1, 1)
    assert message.startswith("rank 0 stops at W0.0: it waits for I0.0, which waits for it")
    assert hint == "put I0.0 before W0.0 on rank 0"


def test_update_before_a_backward_of_its_step_waits_for_ever():
    rule = {"weight_rule": DOUBLE_BUFFERED}
    message, hint = refused("F0.0 F0.1 B0.0 U0.0 B0.1", 1, 2, **rule)
    assert message.startswith("rank 0 stops at U0.0: it waits for B0.1, which waits for it")
    assert hint == "put B0.1 before U0.0 on rank 0"


INCOMPLETE = [
    ("F0.0 B0.0 B0.1", "F0.1 is missing", "add F0.1 to the rank of stage 0"),
    ("F0.0 F0.1 B0.0", "F0.1 has no backward", "add B0.1, or I0.1 and W0.1, after it"),
    ("F0.0 F0.1 B0.0 I0.1", "I0.1 is there and W0.1 is missing", "add W0.1"),
    ("F0.0 F0.1 B0.0 W0.1", "W0.1 is there and I0.1 is missing", "add I0.1"),
    (
        "F0.0 F0.1 B0.0 B0.1 W0.1",
        "both B0.1 and W0.1 are there",
        "B is I and W in one: delete B0.1 or W0.1",
    ),
    ("F0.0 F0.0 F0.1 B0.0 B0.1", "F0.0 stands twice on rank 0", "delete one"),
    (
        "F0.0 F0.1 B0.0 B0.1 F0.2",
        "rank 0 does F0.2, but there are 1 stages and 2 micro-batches",
        "stages run from 0 to 0, micro-batches from 0 to 1",
    ),
    (
        "F0.0 F0.1 B0.0 B0.1 F1.0",
        "rank 0 does F1.0, but there are 1 stages and 2 micro-batches",
        "stages run from 0 to 0, micro-batches from 0 to 1",
    ),
    (
        "F0.0 F0.1 B0.0 B0.1 U0.1",
        "rank 0 does U0.1, but there are 1 stages and 1 steps",
        "stages run from 0 to 0, steps from 0 to 0",
    ),
]


@pytest.mark.parametrize(("order", "message", "hint"), INCOMPLETE)
def test_missing_or_doubled_action_is_named_beside_its_rank(order, message, hint):
    assert refused(order, 1, 2) == (f"{message}\n  rank 0  {order}", hint)


def test_empty_orders_miss_the_first_forward():
    assert refused("", 1, 1)[0] == "F0.0 is missing"


def test_action_on_two_ranks_is_named_with_both():
    message, hint = refused("F0.0 B0.0\nF0.0", 1, 1)
    assert message == (
        "F0.0 stands twice on rank 0 and on rank 1\n  rank 0  F0.0 B0.0\n  rank 1  F0.0"
    )
    assert hint == "delete one"


def test_backward_on_another_rank_than_its_forward_is_refused():
    message, hint = refused("F0.0\nB0.0", 1, 1)
    assert message == ("F0.0 is on rank 0 and B0.0 on rank 1\n  rank 0  F0.0\n  rank 1  B0.0")
    assert hint == "move B0.0 to rank 0: the activations are there"


UPDATES = [
    ("F0.0 F0.1 B0.0 B0.1", "num_steps is 2, weights are double_buffered, U0.0 is missing"),
    ("F0.0 B0.0 U0.0 F0.1 B0.1", "U0.1 is missing on rank 0"),
    ("F0.0 B0.0 U0.0 F0.1 B0.1 U0.1 U0.0", "U0.0 stands twice on rank 0"),
    ("F0.0 F0.1 U0.0 U0.1", "there are updates but no backward"),
    ("F0.0 B0.0 U0.0 F0.1 B0.1 U0.1\nU0.0", "U0.1 is missing on rank 1"),
]


@pytest.mark.parametrize(("orders", "message"), UPDATES)
def test_window_lists_every_update_once_where_its_stage_lives(orders, message):
    found, _ = refused(orders, 1, 1, num_steps=2, weight_rule=DOUBLE_BUFFERED)
    assert found.splitlines()[0] == message


def test_rank_with_work_updates_no_stage_of_others():
    orders = "F0.0 B0.0 U0.0 U1.0\nF1.0 B1.0 U1.0"
    found, _ = refused(orders, 2, 1, weight_rule=DOUBLE_BUFFERED)
    assert found.splitlines()[0] == "rank 0 does U1.0, and no forward of stage 1"


def test_one_step_that_is_not_synchronous_lists_its_update():
    message, hint = refused("F0.0 B0.0", 1, 1, weight_rule=DOUBLE_BUFFERED)
    assert message == "num_steps is 1, weights are double_buffered, U0.0 is missing"
    assert hint == "list U(stage, step) after the last backward of each step"


@pytest.mark.parametrize("name", ["num_stages", "num_micro_batches", "num_steps"])
def test_size_below_one_is_refused(name):
    sizes = {"num_stages": 1, "num_micro_batches": 1, "num_steps": 1, name: 0}
    with pytest.raises(ScheduleError, match=f"{name} is 0"):
        Schedule(orders=Orders.of([actions("F0.0 B0.0")]), **sizes)


@pytest.mark.parametrize("name", ["two\nlines", " outer ", "two  spaces"])
def test_name_that_would_not_read_back_is_refused(name):
    with pytest.raises(ScheduleError, match="name is"):
        dataclasses.replace(gpipe(1, 1), name=name)


def test_forwards_alone_are_a_schedule():
    schedule = Schedule(2, 2, (actions("F0.0 F0.1"), actions("F1.0 F1.1")))
    assert schedule.num_ranks == 2


def test_stage_may_live_on_two_ranks_each_with_its_own_micro_batches():
    orders = (actions("F0.0 F1.1 B1.1 B0.0"), actions("F0.1 F1.0 B1.0 B0.1"))
    schedule = Schedule(2, 2, orders)
    assert schedule.stage_ranks == ((0, 1), (0, 1))
    assert [[schedule.rank_of(stage, m) for m in range(2)] for stage in range(2)] == [
        [0, 1],
        [1, 0],
    ]


def test_update_of_a_stage_on_two_ranks_waits_for_the_backwards_on_both():
    """Rank 1 does its backward only after an update that waits for it."""
    orders = "F0.0 B0.0 U0.0\nF0.1 U0.0 B0.1"
    message, _ = refused(orders, 1, 2, weight_rule=DOUBLE_BUFFERED)
    assert message.startswith("rank 1 stops at U0.0: it waits for B0.1, which waits for it")
    late = (actions("F0.0 B0.0 U0.0"), actions("F0.1 F0.2 B0.1 B0.2 U0.0"))
    schedule = Schedule(1, 3, late, weight_rule=DOUBLE_BUFFERED)
    assert schedule.play((1.0, 5.0, 0.0, 0.0, 1.0))[1].tolist() == [13.0, 13.0]


def test_equal_schedules_are_equal_and_hash_alike():
    assert one_f_one_b(3, 4) == one_f_one_b(3, 4) != one_f_one_b(3, 5)
    assert hash(one_f_one_b(3, 4)) == hash(one_f_one_b(3, 4))
    assert one_f_one_b(3, 4) != dataclasses.replace(one_f_one_b(3, 4), name="mine")


def test_schedule_comes_back_from_another_process():
    schedule = double_buffered(3, 2)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


def test_arrays_cannot_be_written():
    schedule = gpipe(2, 2)
    with pytest.raises(ValueError, match="read-only"):
        schedule.orders.kinds[0] = 1


def verdict(orders, num_stages: int, m: int) -> ScheduleError | None:
    try:
        Schedule(num_stages, m, Orders.of(orders))
    except ScheduleError as error:
        return error
    return None


BUILDERS = (gpipe, one_f_one_b, interleaved, zb_h1)


@given(st.sampled_from(BUILDERS), st.integers(1, 4), st.integers(1, 3), st.data())
def test_verdict_on_a_changed_schedule_is_that_of_the_definition(builder, num_stages, m, data):
    orders = [list(order) for order in builder(num_stages, m).orders]
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        _change(orders, data)
    error = verdict(orders, num_stages, m)
    assert is_valid(orders, num_stages, m) == (error is None), error
    assert error is None or error.hint


def _change(orders, data):
    places = [(r, at) for r, order in enumerate(orders) for at in range(len(order))]
    if not places:
        return
    rank, at = data.draw(st.sampled_from(places), "place")
    action = orders[rank][at]
    to = data.draw(st.integers(0, len(orders) - 1), "rank")
    index = data.draw(st.integers(0, len(orders[to])), "index")
    match data.draw(st.sampled_from(["drop", "double", "move", "swap", "split", "rename"])):
        case "drop":
            del orders[rank][at]
        case "double":
            orders[to].insert(index, action)
        case "move":
            del orders[rank][at]
            orders[to].insert(index, action)
        case "swap":
            other = data.draw(st.integers(0, len(orders[rank]) - 1), "other")
            order = orders[rank]
            order[at], order[other] = order[other], order[at]
        case "split":
            orders[rank][at : at + 1] = [action._replace(kind=kind) for kind in "IW"]
        case "rename":
            orders[rank][at] = action._replace(micro_batch=action.micro_batch + 1)


@given(
    st.permutations(actions("F0.0 F0.1 B0.0 B0.1")), st.permutations(actions("F1.0 F1.1 B1.0 B1.1"))
)
def test_every_order_of_two_ranks_is_judged_as_it_runs(first, second):
    error = verdict([first, second], 2, 2)
    assert is_valid([first, second], 2, 2) == (error is None), error
    assert error is None or "which waits for it" in error.message


@pytest.mark.parametrize(
    ("text", "in_order"),
    [
        ("F0.0 F0.1 B0.1 B0.0\nF1.0 F1.1 B1.1 B1.0", True),
        ("F0.0 F0.1 F1.0 B1.0 B0.0 B0.1\nF1.1 B1.1", False),  # stage 1 lives on two ranks
        ("F0.0 F0.1 B0.0 B0.1\nF1.1 F1.0 B1.0 B1.1", False),
        ("F0.0 F1.0 F0.1 F1.1 B1.1 B1.0 B0.0 B0.1", True),
    ],
)
def test_schedule_is_in_order_if_each_stage_sees_all_forwards_by_number(text, in_order):
    orders = tuple(actions(line) for line in text.splitlines())
    assert Schedule(2, 2, orders).is_in_order == in_order


@pytest.mark.parametrize(
    ("order", "message", "hint"),
    [
        (
            "F0.0 B0.0 F0.1",
            "B0.0 is of micro-batches 0 to 1, and comes before F of one of them",
            "put it after F of all of them",
        ),
        (
            "F0.0 F0.1 I0.0 W0.0 I0.1",
            "W0.0 is of micro-batches 0 to 1, and comes before F and I of one",
            "put it after F and I of all",
        ),
        ("F0.0 F0.1 B0.1", "B0.1 is not the first of 2 together", "list B0.0 once for all of them"),
        ("F0.0 F0.1 B0.0 B0.0", "B0.0 stands twice", "delete one"),
        ("F0.0 F0.1 I0.0 I0.1", "I0.0 is there and W0.0 is missing", "add W0.0"),
    ],
)
def test_backward_of_several_micro_batches_stands_once_after_all_of_them(order, message, hint):
    said = refused(order, 1, 2, together=2)
    assert message in said[0]
    assert hint in said[1]


def test_backward_of_several_micro_batches_reads_back_and_reads_one_version():
    orders = (actions("F0.0 F0.1 F0.2 F0.3 B0.0 B0.2"),)
    made = Schedule(1, 4, orders, name="two by two", together=2)
    assert "weights synchronous, together 2" in str(made)
    assert Schedule.parse(str(made)) == made == Schedule.from_json(made.to_json())
    assert refused("F0.0 F0.1 F0.2 B0.0", 1, 3, together=2)[0].startswith("3 micro-batches cannot")
    assert refused("F0.0 F0.1 F0.2 F0.3 B0.0 I0.2 W0.2", 1, 4, together=2)[0].startswith("B of 2")
    later = WeightRule("later", lambda s, m, stages, per: Reads(0 * m, m // 2, m // per))
    text = "F0.0 F0.1 F0.2 F0.3 F0.4 F0.5 B0.0 U0.0 B0.3 U0.1"
    said = refused(text, 1, 3, num_steps=2, weight_rule=later, together=3)
    assert "gives B of micro-batches 1 and 2 of stage 0, which are one action" in said[0]
