"""What the runtime measures is what the replay takes it for: plans of all kinds, run on threads."""

from dataclasses import replace

import pytest

from penstock.graph.trace import Capture, capture
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.run import run
from penstock.simulate.critical_path import critical_path
from penstock.simulate.what_if import Change, measured_run, what_if
from penstock.timeline import Timeline, step_s
from tests.cli import mlp

JOB = replace(mlp.job(), clip_norm=1.0)
PLANS = [
    ("gpipe", (1,), {}),
    ("one_f_one_b", (1,), {"clip": True}),
    ("one_f_one_b", (1,), {"clip": True, "post_validation": True}),
    ("zb_h1", (1,), {}),
    ("interleaved", (0, 1, 2), {"num_ranks": 2}),
    ("chimera", (1,), {"clip": True}),
    ("double_buffered", (1,), {}),
    ("one_f_one_b", (), {"replicas": 2, "clip": True}),
    ("one_f_one_b", (1,), {"replicas": 2}),
]


@pytest.fixture(scope="module")
def captured() -> Capture:
    return capture(JOB)


def measured(plan: Plan, captured: Capture, num_steps: int) -> Timeline:
    program = lower_plan(plan, captured.graph, num_steps=num_steps)
    job = JOB if plan.agreement.clip else replace(JOB, clip_norm=None)
    stages = stages_of(plan, captured.graph)
    return run(program, captured, stages, job, num_steps=4).timeline


@pytest.mark.parametrize(("schedule", "cuts", "more"), PLANS)
def test_measured_window_is_replayed_and_explained(
    captured: Capture, schedule: str, cuts: tuple[int, ...], more: dict[str, object]
) -> None:
    plan = plan_by_hand(captured.graph, cuts, schedule, num_micro_batches=4, **more)
    num_steps = 2 if schedule == "double_buffered" else 1
    timeline = measured(plan, captured, num_steps)
    found = measured_run(plan, captured.graph, timeline)
    last = "update", "collective"  # a norm that validates comes after the updates
    ends_s = max(span.end_s for span in timeline.spans if span.lane in last)
    assert found.replayed_s * num_steps == pytest.approx(ends_s, rel=1e-6)
    path = critical_path(found.program, timeline)
    assert path.step_s == step_s(timeline)
    assert {hop.rank for hop in path.hops} <= set(range(plan.total_ranks))
    assert any(hop.reason == "compute" for hop in path.hops)
    slower = Change(ranks=tuple((rank, 0.1) for rank in range(plan.total_ranks)))
    assert 1 < what_if(found, slower).ratio <= 10
