"""The check says equal where it is, and notices what is not."""

import math
from dataclasses import replace

import pytest
import torch

from penstock.program.lower_plan import is_asynchronous, schedule_of
from penstock.runtime import check as checking
from penstock.runtime.check import Difference, check
from tests.parity.models import TRAINING, captured, job_of, plan_of

EXACT = torch.float64
BITWISE = ("gpipe", "one_f_one_b", "interleaved", "zb_h1")  # add gradients up in order


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("name", ["dropout", "batch_norm", "frozen", "frozen_start"])
def test_planned_step_equals_the_plain_one(name, schedule):
    plan = plan_of(captured(name, EXACT).graph, schedule, 4, 3)
    differences = check(plan, captured(name, EXACT), job_of(name, EXACT, "adamw"))
    groups, several = {d.what for d in differences}, is_asynchronous(plan)
    shared = any(len(ranks) > 1 for ranks in schedule_of(plan).stage_ranks)
    assert groups >= ({"weights"} if several else {"loss", "gradients"})
    assert ("buffers" in groups) == (name == "batch_norm" and not several and not shared)
    assert [d for d in differences if d.value > 1e-12] == []
    assert all(d.bitwise for d in differences) or schedule not in BITWISE


@pytest.mark.parametrize("name", ["tied", "batch_norm"])
def test_replicas_are_checked_too(name):
    plan = plan_of(captured(name, EXACT).graph, "one_f_one_b", 2, 2, replicas=2)
    differences = check(plan, captured(name, EXACT), job_of(name, EXACT))
    assert [d.what for d in differences] == ["loss", "gradients"]
    assert max(d.value for d in differences) < 1e-12


@pytest.mark.parametrize("clip", [True, False])
def test_gradients_are_clipped_if_the_plan_clips(clip):
    plan = plan_of(captured("tied", EXACT).graph, "zb_h1", 4, 2, clip=clip)
    job = job_of("tied", EXACT, clip_norm=0.01)
    assert max(d.value for d in check(plan, captured("tied", EXACT), job)) < 1e-12
    norm = sum(
        float(value.square().sum())
        for key, value in checking.plain_step(replace(job, clip_norm=None), 2).items()
        if key.startswith("gradients/")
    )
    assert math.sqrt(norm) > 0.1


def test_other_weights_are_noticed():
    made = captured("gpt", EXACT)
    plan = plan_of(made.graph, "one_f_one_b", 2, 2)
    differences = check(plan, made, replace(job_of("gpt", EXACT), seed=4))
    assert all(d.value > 1e-3 for d in differences)
    assert all(not d.bitwise and d.where for d in differences)


def test_a_gradient_that_is_not_there_is_noticed():
    found = {"gradients/a": torch.ones(2)}
    expected = {**found, "gradients/b": torch.ones(2)}
    assert checking._compare("gradients", found, expected) == Difference(
        "gradients", "gradients/b", math.inf, bitwise=False
    )


NAN = math.nan


@pytest.mark.parametrize(
    ("found", "expected", "value"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 3.0], [1.0, 4.0], 0.25),
        ([1e-3], [0.0], 1e-3),
        ([NAN, 2.0], [NAN, 2.0], 0.0),
        ([NAN, 2.0], [1.0, 2.0], math.inf),
        ([1.0], [NAN], math.inf),
        ([], [], 0.0),
    ],
)
def test_difference_is_relative_to_the_greatest_number(found, expected, value):
    worse, fine = {"a/x": torch.tensor(found)}, {"a/y": torch.ones(1)}
    right = {"a/x": torch.tensor(expected), "a/y": torch.ones(1) + 1e-6}
    difference = checking._compare("a", worse | fine, right)
    assert difference.value == pytest.approx(value if value else 1e-6, rel=1e-1)
    assert difference.where == ("a/x" if value else "a/y")
    assert not difference.bitwise
