"""Stages that repeat some ops of F train the plain loop, and hold what was predicted."""

import pytest
import torch

from penstock.errors import ScheduleError
from penstock.graph.keeping import keepings_of
from penstock.plan import Plan
from penstock.program.lower_plan import lower_plan, stages_of
from penstock.search.min_cut import within
from tests.parity.models import captured, plan_of
from tests.parity.test_plain_loop import assert_equal_bits, expected, run_of, train
from tests.runtime.test_memory import CLOSE, measured, predicted

FLOAT = torch.float32


def in_part(name: str, schedule: str, stages: int, part: float) -> tuple[Plan, dict[str, object]]:
    """Return a plan whose stages keep at most a part of what they would, and its recompute."""
    graph = captured(name, FLOAT).graph
    plan = plan_of(graph, schedule, stages, 4)
    op_s = [1.0 + node.flop for node in graph.nodes]
    again = []
    for keeping in keepings_of(graph, plan.cuts):
        cut = within(keeping, op_s, int(part * keeping.held_bytes(keeping.asked)))
        assert cut is not None, "what a stage received is less than that"
        again.append(cut.again or False)
    options = {"recompute": tuple(again)}
    return plan_of(graph, schedule, stages, 4, **options), options


@pytest.mark.parametrize(
    ("name", "schedule", "part"),
    [
        ("dropout", "one_f_one_b", 0.8),
        ("dropout", "zb_h1", 0.5),
        ("gpt", "gpipe", 0.5),
        ("batch_norm", "one_f_one_b", 0.6),
        ("dropout", "pipedream", 0.7),
    ],
)
def test_any_budget_gives_the_bits_of_the_plain_loop(name, schedule, part, tmp_path):
    plan, options = in_part(name, schedule, 2, part)
    held = [
        sum(
            stage.forward.change_bytes
            for stage in stages_of(each, captured(name, FLOAT).graph).stages
        )
        for each in (plan_of(captured(name, FLOAT).graph, schedule, 2, 4), plan)
    ]
    assert held[1] <= part * held[0]
    if schedule != "pipedream":
        run = run_of(name, FLOAT, "adamw", schedule, 2, 4, **options)
        assert_equal_bits(run, train(run, tmp_path), expected(name, FLOAT, "adamw", 4))
    assert measured(plan, name) == pytest.approx(predicted(plan, name), rel=CLOSE)


def test_ops_are_not_repeated_with_weights_that_f_did_not_read():
    plan, _ = in_part("dropout", "timeprest", 2, 0.5)
    with pytest.raises(ScheduleError, match="stage 0 is to repeat some ops, and timeprest"):
        lower_plan(plan, captured("dropout", FLOAT).graph, num_steps=4)
