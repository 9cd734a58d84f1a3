"""Stages that repeat some ops of F train the plain loop, and hold what was predicted."""

from typing import Any

import pytest
import torch

from penstock.errors import ScheduleError
from penstock.graph.keeping import keepings_of
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.search.min_cut import within
from tests.parity.models import captured, plan_of
from tests.parity.test_plain_loop import assert_equal_bits, expected, run_of, train
from tests.parity.training import differing
from tests.runtime.test_memory import CLOSE, measured, predicted

FLOAT = torch.float32


def in_part(name: str, schedule: str, part: float, **options) -> dict[str, Any]:
    """Return the options of a plan whose two stages keep at most a part of what they would."""
    graph = captured(name, FLOAT).graph
    plan = plan_of(graph, schedule, 2, 4)
    op_s = [1.0 + node.flop for node in graph.nodes]
    again = []
    for keeping in keepings_of(graph, plan.cuts):
        cut = within(keeping, op_s, int(part * keeping.held_bytes(keeping.asked)))
        assert cut is not None, "what a stage received is less than that"
        again.append(cut.again or False)
    return {**options, "recompute": tuple(again)}


def held_bytes(plan: Plan, name: str) -> int:
    stages = stages_of(plan, captured(name, FLOAT).graph).stages
    return sum(stage.forward.change_bytes for stage in stages)


@pytest.mark.parametrize(
    ("name", "schedule", "part"),
    [("dropout", "zb_h1", 0.5), ("batch_norm", "one_f_one_b", 0.6), ("dropout", "pipedream", 0.7)],
)
def test_a_part_of_the_bytes_is_kept_and_the_peak_is_the_predicted_one(name, schedule, part):
    graph = captured(name, FLOAT).graph
    plan = plan_of(graph, schedule, 2, 4, **in_part(name, schedule, part))
    assert held_bytes(plan, name) <= part * held_bytes(plan_of(graph, schedule, 2, 4), name)
    assert measured(plan, name) == pytest.approx(predicted(plan, name), rel=CLOSE)


@pytest.mark.parametrize(
    ("name", "schedule", "part"),
    [("dropout", "one_f_one_b", 0.8), ("dropout", "zb_h1", 0.4), ("batch_norm", "gpipe", 0.6)],
)
def test_any_budget_gives_the_bits_of_the_plain_loop(name, schedule, part, tmp_path):
    run = run_of(name, FLOAT, "adamw", schedule, 2, 4, **in_part(name, schedule, part))
    assert_equal_bits(run, train(run, tmp_path), expected(name, FLOAT, "adamw", 4))


@pytest.mark.parametrize(
    ("schedule", "replicas", "options"),
    [
        ("one_f_one_b", 2, {"shard": ("shard", "shard_keep")}),
        ("pipedream", 1, {"offload": ("both", "activations")}),
    ],
)
def test_what_is_repeated_changes_no_bit_of_what_else_a_plan_does(
    schedule, replicas, options, tmp_path
):
    run = run_of("dropout", FLOAT, "adamw", schedule, 2, 4, replicas=replicas)
    plain, again = (
        train(run._replace(plan=run.plan.changed(**way)), tmp_path / str(len(way)))
        for way in (options, in_part("dropout", schedule, 0.6, **options))
    )
    assert differing(again.weights, plain.weights) == []
    assert [step.loss for step in again.steps] == [step.loss for step in plain.steps]


def test_ops_are_not_repeated_with_weights_that_f_did_not_read():
    graph = captured("dropout", FLOAT).graph
    plan = plan_of(graph, "timeprest", 2, 4, **in_part("dropout", "timeprest", 0.5))
    with pytest.raises(ScheduleError, match="stage 0 is to repeat some ops, and timeprest"):
        lower_plan(plan, graph, num_steps=4)
