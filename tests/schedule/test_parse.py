import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    Reads,
    Schedule,
    WeightRule,
    double_buffered,
    gpipe,
    one_f_one_b,
    zb_h1,
)

TORCH_CSV = Path(__file__).parent / "torch_csv"  # written by torch 2.13
names = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=12)


@given(names.map(lambda name: " ".join(name.split())))
def test_any_name_reads_back(name):
    schedule = dataclasses.replace(double_buffered(2, 3), name=name)
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_schedule_prints_its_sizes_and_a_line_per_rank():
    assert str(zb_h1(2, 1)) == (
        "schedule zb_h1: stages 2, micro-batches 1, steps 1, weights synchronous\n"
        "rank 0  F0.0 I0.0 W0.0\n"
        "rank 1  F1.0 I1.0 W1.0"
    )


def test_lines_of_ranks_alone_are_one_synchronous_step():
    lines = "# mine\n\nrank 0  F0.0 F0.1 B0.0 B0.1\n  rank 1 F1.0 B1.0 F1.1   B1.1\n"
    schedule = Schedule.parse(lines)
    assert schedule == dataclasses.replace(one_f_one_b(2, 2), name="")


REFUSED = [
    ("", "num_stages is 0"),
    ("rank 0  F0.0 B0.0 X", "line 1: 'X' is not an action"),
    ("\nrank 1  F0.0 B0.0", "line 2 is 'rank 1  F0.0 B0.0', where rank 0 is due"),
    ("rank 0  F0.0 B0.0\nrank 0", "line 2 is 'rank 0', where rank 1 is due"),
    ("rank 0  F0.0 B0.0\n" + str(gpipe(1, 1)), "where rank 1 is due"),
    ("schedule x: stages 1\nrank 0", "line 1 is 'schedule x: stages 1', where rank 0 is due"),
    (str(gpipe(2, 2)).replace("synchronous", "stale"), "there is no weight rule stale"),
    (str(gpipe(2, 2)).replace("stages 2", "stages 3"), "F2.0 is missing"),
    ("rank 0  F0.0 B0.0 U0.0 U0.1", "rank 0 does U0.1, but there are 1 stages and 1 steps"),
]


@pytest.mark.parametrize(("lines", "message"), REFUSED)
def test_text_that_is_no_schedule_is_refused_with_its_place(lines, message):
    with pytest.raises(ScheduleError) as caught:
        Schedule.parse(lines)
    assert message in caught.value.message
    assert caught.value.hint


def test_own_weight_rule_is_read_when_it_is_given():
    def law(stage, micro_batch, num_stages, num_micro_batches, /):
        step = micro_batch // num_micro_batches
        return Reads(step, step, step)

    rule = WeightRule("mine", law)
    lines = "schedule: stages 1, micro-batches 1, steps 1, weights mine\nrank 0  F0.0 B0.0 U0.0"
    assert Schedule.parse(lines, weight_rules=[rule]).weight_rule is rule
    with pytest.raises(ScheduleError, match="there is no weight rule mine") as caught:
        Schedule.parse(lines)
    assert caught.value.hint.startswith("use one of: synchronous, double_buffered, stashing, ")


def test_saved_schedule_is_json_with_a_text_per_rank_and_loads(tmp_path):
    path = tmp_path / "schedule.json"
    gpipe(2, 2).save(path)
    content = json.loads(path.read_text())
    assert content["orders"] == ["F0.0 F0.1 B0.0 B0.1", "F1.0 F1.1 B1.0 B1.1"]
    assert content["penstock"] == "schedule"
    assert Schedule.load(path) == gpipe(2, 2)
    assert list(tmp_path.iterdir()) == [path]


def without(key):
    return {other: value for other, value in gpipe(2, 2).to_json().items() if other != key}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (without("num_stages"), "num_stages is missing"),
        ({**without(""), "num_steps": "1"}, "num_steps is '1'"),
        ({**without(""), "num_steps": True}, "num_steps is True"),
        (without("orders"), "orders is missing"),
        ({**without(""), "orders": [1]}, "orders[0] is 1, not a text"),
        ({**without(""), "orders": ["F0.0 F0"]}, "rank 0: 'F0' is not an action"),
        ({**without(""), "weight_rule": None}, "weight_rule is None, not a text"),
        ({**without(""), "penstock": "plan"}, "this is a plan, not a schedule"),
    ],
)
def test_json_that_is_no_schedule_is_refused(content, message, tmp_path):
    path = tmp_path / "schedule.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ScheduleError) as caught:
        Schedule.load(path)
    assert message in caught.value.message
    assert caught.value.hint


def test_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="cannot read schedule"):
        Schedule.load(tmp_path / "none.json")


def test_schedules_of_torch_are_read_with_overlapped_actions_one_after_the_other():
    schedule = Schedule.parse_torch_csv((TORCH_CSV / "dual_pipe_v.csv").read_text())
    assert schedule.num_ranks == 2
    assert schedule.num_stages == schedule.num_micro_batches == 4
    assert " ".join(map(str, schedule.orders[0][6:12])) == "F3.1 F0.3 B3.1 F3.2 B0.0 B3.2"
    vee = Schedule.parse_torch_csv((TORCH_CSV / "zbv.csv").read_text())
    assert vee.stage_ranks == ((0,), (1,), (1,), (0,))


def test_messages_shards_and_reductions_of_torch_are_passed_over():
    rows = "0UNSHARD,0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n1RECV_F0,1F0, 1B0,1SEND_B0\n"
    schedule = Schedule.parse_torch_csv(rows)
    assert schedule == dataclasses.replace(gpipe(2, 1), name="")


@pytest.mark.parametrize("cell", ["F0.0", "0X0", "0F", "(0F0;0B0)", "0UNSHARDED"])
def test_cell_that_is_not_of_torch_is_refused(cell):
    with pytest.raises(ScheduleError, match="among its actions") as caught:
        Schedule.parse_torch_csv(f"0F0,0B0\n{cell}")
    assert caught.value.message.startswith("rank 1 has ")
