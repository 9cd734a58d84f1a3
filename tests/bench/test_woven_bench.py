"""The bench of woven units: its plans differ in the order of units alone."""

import pytest

from bench import woven
from bench.network import can_throttle
from bench.play import Rounds
from bench.zoo import JOBS
from penstock.choose.prepare import divided_step
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.schedule.grid import InnerAxis


def test_plans_differ_in_the_order_of_units() -> None:
    job = JOBS["small gpt"]
    graph = divided_step(capture(job), InnerAxis(woven.RANKS), SILENT).graph
    plans = woven.plans_of(graph, job.micro_batches)
    names = [plan.schedule.name.split(" / ")[0] for plan in plans]
    assert names == ["gpipe", "gpipe", "one_f_one_b", "one_f_one_b"]
    assert [plan.schedule.woven for plan in plans] == [False, True] * 2
    assert len({plan.cuts for plan in plans}) == 1


@pytest.mark.long
def test_rows_are_of_a_line() -> None:
    can, why = can_throttle()
    if not can:
        pytest.skip(why)
    rows = list(woven.rows("small gpt", 150e6, Rounds(1, 0.1)))
    assert [row["order"] for row in rows] == ["one after the other", "in turn"] * 2
    for plain, turn in zip(rows[::2], rows[1::2], strict=True):
        assert turn["predicted_speedup"] == plain["predicted_s"] / turn["predicted_s"]
