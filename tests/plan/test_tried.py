"""Tried: a plan in one line, and the table of what was tried beside it."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan import Plan, Prediction, plan_by_hand
from penstock.plan.tried import Tried, headline, in_words, is_tie, tried_lines
from penstock.units import MiB
from tests.search.chains import chain

GRAPH = chain([3, 3, 3], [5, 6, 7])
ALONE = Tried("one process", 1, 0.44, 190 * MiB)
CUT = Tried("pipeline of 2 stages on 2 processes (zb_h1)", 2, 0.239, 88 * MiB)
PLAN = replace(
    plan_by_hand(GRAPH, [], "one_f_one_b", num_micro_batches=4, replicas=2),
    predicted=Prediction(0.232, (107 * MiB, 107 * MiB), tried=(ALONE, CUT)),
)


def test_first_line_is_plain() -> None:
    assert headline(PLAN) == "data parallel on 2 processes: 1.9x one process, 107 MiB each"
    assert str(PLAN).splitlines()[0] == headline(PLAN)


def test_step_stands_there_where_nobody_knows_one_process() -> None:
    plan = replace(PLAN, predicted=Prediction(0.232, (MiB, 3 * MiB)))
    assert (
        headline(plan) == "data parallel on 2 processes: 232 ms a step, 1.00 MiB to 3.00 MiB each"
    )
    assert headline(replace(PLAN, predicted=None)) == "data parallel on 2 processes"


def test_one_process_is_not_compared_with_itself() -> None:
    alone = plan_by_hand(GRAPH, [], "one_f_one_b", num_micro_batches=8)
    plan = replace(alone, predicted=Prediction(0.44, (MiB,), tried=(CUT,)))
    assert headline(plan) == "one process: 440 ms a step, 1.00 MiB"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (plan_by_hand(GRAPH, [1], "gpipe", num_micro_batches=4), "pipeline of 2 stages on 2 "),
        (PLAN.changed(shard=("shard",)), "data parallel on 2 processes, in shards"),
        (PLAN.changed(recompute=(True,)), "data parallel on 2 processes, recompute"),
        (PLAN.changed(offload=("state",)), "data parallel on 2 processes, far memory"),
    ],
)
def test_words_say_what_makes_the_plan_another_one(plan: Plan, words: str) -> None:
    assert in_words(plan).startswith(words)


def test_table_has_the_fastest_first_and_calls_a_tie_a_tie() -> None:
    head, *rows = tried_lines(PLAN)
    assert head.split() == ["tried", "step", "peak"]
    assert [row.rpartition("  ")[2] for row in rows] == ["this plan", "a tie", "1.90x as long"]


@given(st.floats(1e-6, 1e3), st.floats(0.5, 2.0))
def test_tie_is_what_no_prediction_can_tell_apart(own_s: float, times: float) -> None:
    assert is_tie(own_s * times, own_s) == (abs(own_s * times / own_s - 1) <= 0.05)


def test_what_was_tried_is_saved_with_the_plan(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
