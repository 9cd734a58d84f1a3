"""search.adapt: never worse than staying, the best of all that fit, by a simulation of its own."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.schedule import gpipe, interleaved, one_f_one_b, peak_activations, zb_h1
from penstock.search.choices.adapt import Setting, StageCosts, adapt

CHOICES = (one_f_one_b, zb_h1, gpipe)
seconds = st.integers(0, 5).map(float)
costs = st.builds(
    StageCosts, seconds, seconds, seconds, seconds, seconds, seconds, st.sampled_from([8, math.inf])
)
rates = st.builds(Link, seconds, st.sampled_from([1.0, 3.0, math.inf]))


@st.composite
def pipelines(draw):
    stages = draw(st.lists(costs, min_size=1, max_size=4))
    links = [draw(rates) for _ in stages[1:]]
    batch = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    return (
        stages,
        links,
        batch,
        Setting(draw(st.sampled_from(CHOICES)), draw(st.sampled_from(counts))),
    )


def step_s(stages, links, batch, setting):
    """Return the step, action after action in the order of each rank."""
    schedule = setting.schedule(len(stages), setting.num_micro_batches)
    samples = batch / setting.num_micro_batches
    orders = [list(order) for order in schedule.orders]
    end, free = {}, [0.0] * len(orders)
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                action = order[0]
                stage, number = action.stage, action.micro_batch
                near = stage - 1 if action.kind == "F" else stage + 1
                starts = free[rank]
                if action.kind != "W" and 0 <= near < len(stages):
                    kinds = "F" if action.kind == "F" else "BI"
                    sources = [
                        end[kind, near, number] for kind in kinds if (kind, near, number) in end
                    ]
                    if not sources:
                        break
                    edge = min(near, stage)
                    size = samples * stages[edge].sent_bytes
                    wire = links[edge].latency_s + size / links[edge].bytes_per_s
                    starts = max(starts, sources[0] + wire)
                cost = stages[stage]
                each = {
                    "F": cost.forward_s,
                    "I": cost.input_s,
                    "W": cost.weights_s,
                    "B": cost.input_s + cost.weights_s,
                }[action.kind]
                free[rank] = end[action.kind, stage, number] = starts + cost.call_s + samples * each
                order.pop(0)
    return max(free)


def fits(stages, batch, setting):
    schedule = setting.schedule(len(stages), setting.num_micro_batches)
    samples = batch / setting.num_micro_batches
    return all(
        count * samples * stage.kept_bytes <= stage.room_bytes
        for stage, count in zip(stages, peak_activations(schedule), strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_setting_equals_brute_force_and_is_never_worse_than_staying(case):
    stages, links, batch, now = case
    found = adapt(stages, links, batch, now=now, schedules=CHOICES)
    counts = [count for count in range(1, batch + 1) if batch % count == 0]
    every = [Setting(schedule, count) for schedule in CHOICES for count in counts]
    fitting = [setting for setting in every if fits(stages, batch, setting)]
    assert [setting for setting, _ in found.tried] == fitting
    expected = {setting: step_s(stages, links, batch, setting) for setting in {*fitting, now}}
    assert found.staying_s == pytest.approx(expected[now])
    assert found.step_s == pytest.approx(min(expected.values()))
    assert found.step_s <= found.staying_s
    assert expected[found.setting] == pytest.approx(found.step_s)
    for setting, step in found.tried:
        assert step == pytest.approx(expected[setting])


@given(pipelines())
@settings(max_examples=40, deadline=None)
def test_batch_stays_what_it_was(case):
    stages, links, batch, now = case
    found = adapt(stages, links, batch, now=now)
    assert all(batch % setting.num_micro_batches == 0 for setting, _ in found.tried)
    assert batch % found.setting.num_micro_batches == 0


STAGES = (StageCosts(0.001, 0.01, 0.01, 0.01, sent_bytes=1e6),) * 4
NEAR = (Link(1e-4, 1e9),) * 3


def test_slower_region_gets_fewer_and_larger_micro_batches():
    """Latency between the regions of stages 1 and 2 grows from 0.1 ms to 300 ms."""
    before = adapt(STAGES, NEAR, 64, now=Setting(one_f_one_b, 64), schedules=(one_f_one_b,))
    far = (NEAR[0], replace(NEAR[1], latency_s=0.3), NEAR[2])
    after = adapt(STAGES, far, 64, now=before.setting, schedules=(one_f_one_b,))
    assert after.setting.num_micro_batches < before.setting.num_micro_batches
    assert after.step_s < after.staying_s
    back = adapt(STAGES, NEAR, 64, now=after.setting, schedules=(one_f_one_b,))
    assert back.setting == before.setting


def test_nothing_changes_where_nothing_is_better():
    """Free calls and links: of equally short steps the present one stays."""
    free = (StageCosts(0, 0, 0, 0),)
    now = Setting(gpipe, 3)
    assert adapt(free, (), 6, now=now).setting == now


def test_what_is_kept_limits_the_micro_batches():
    small = tuple(replace(stage, kept_bytes=1.0, room_bytes=8.0) for stage in STAGES)
    found = adapt(small, NEAR, 64, now=Setting(one_f_one_b, 64), schedules=(one_f_one_b, gpipe))
    assert found.setting.schedule is one_f_one_b
    assert {setting.num_micro_batches for setting, _ in found.tried} == {32, 64}


def test_adapted_prints_both_steps():
    found = adapt((StageCosts(1, 0, 0, 0),), (), 2, now=Setting(one_f_one_b, 2))
    assert str(found) == "one_f_one_b, 1 micro-batches: 2.00 s per step; staying: 4.00 s"


def test_what_cannot_be_is_refused():
    now = Setting(one_f_one_b, 8)
    with pytest.raises(PlanError, match="2 links between 4 stages"):
        adapt(STAGES, NEAR[1:], 64, now=now)
    with pytest.raises(PlanError, match="8 micro-batches of a batch of 12"):
        adapt(STAGES, NEAR, 12, now=now)
    with pytest.raises(PlanError, match="places 4 stages on 2 ranks"):
        adapt(STAGES, NEAR, 64, now=now, schedules=(interleaved,))
    with pytest.raises(PlanError, match="call_s of a stage is -1"):
        StageCosts(-1, 0, 0, 0)
    with pytest.raises(PlanError, match="sent_bytes of a stage is inf"):
        StageCosts(0, 0, 0, 0, math.inf)
