"""Where memory is short, plans whose activations wait in far memory compete with recompute."""

from dataclasses import replace

import pytest

from penstock.plan import Plan
from penstock.schedule import peak_activations
from penstock.search import Fixed, JobNeeds, evaluate, search
from penstock.search.judge import Judge
from tests.search.chains import chain, cluster_of, profile_of

GRAPH = chain([1] * 8, [100] * 8)
CAP = 1254  # bytes: the fastest plan takes twice as much
FIXED = Fixed(ranks=2, stages=2, needs=JobNeeds(in_order=True))


def with_cores(memory_bytes, cores=4):
    cluster = cluster_of(2, memory_bytes=memory_bytes)
    return replace(cluster, hosts=(replace(cluster.hosts[0], cores=cores),))


def found(profile, cluster, **more):
    return search(GRAPH, profile, cluster, micro_batches=8, fixed=replace(FIXED, **more))


def usable(result):
    return [each for each in result.candidates if not each.refused]


def test_activations_wait_in_far_memory_where_that_beats_recompute(tmp_path):
    profile = profile_of(GRAPH, [1.0] * 8, far_s_per_byte=1 / 400)  # a quarter of F
    free = found(profile, with_cores(10**9))
    without, result = found(profile, with_cores(CAP, 0)), found(profile, with_cores(CAP))
    assert not any(each.plan.offloads for each in (*free.candidates, *without.candidates))
    plan, rest = result.plan, [each for each in usable(result) if not each.plan.offloads]
    assert plan.schedule.far
    assert not any(plan.recompute)
    assert max(plan.predicted.peak_bytes) <= CAP
    assert (
        plan.predicted.step_s < min(each.step_s for each in rest) == without.plan.predicted.step_s
    )
    bare = plan.changed(schedule=replace(plan.schedule, far=()))
    assert "would hold" in Judge(GRAPH, profile, with_cores(CAP)).candidate(bare).refused
    (why,) = [each for each in plan.decisions if each.what == "far memory"]
    assert why.by == "search"
    assert why.value == f"{len(plan.schedule.far) // 2} of 16 activations wait there"
    most = max(peak_activations(plan.schedule))
    assert why.why.startswith(f"no rank holds more than {most} at once; best alternative (")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    candidate, _ = evaluate(GRAPH, profile, with_cores(CAP), again)
    assert candidate.step_s == plan.predicted.step_s
    assert found(profile, with_cores(CAP)).plan == plan, "no clock decides"


def test_a_gain_below_the_prediction_error_is_not_worth_copies():
    profile = profile_of(GRAPH, [1.0] * 8, far_s_per_byte=1 / 400)
    asked = {"micro_batches": 8, "fixed": FIXED, "error": 0.05}
    plan = search(GRAPH, profile, with_cores(CAP), **asked).plan
    assert not plan.offloads
    (why,) = [each.why for each in plan.decisions if each.what == "simplest"]
    assert why.startswith("1 x 2 stages, exact_offload, copies beside computes, ")
    assert "is less than the prediction error" in why


def test_other_seconds_give_another_order_and_slow_copies_none():
    rows = [1.0] * 8, [*[1.0] * 4, *[2.0] * 4]
    profiles = [profile_of(GRAPH, row, far_s_per_byte=1 / 400) for row in rows]
    orders = [found(each, with_cores(CAP)).plan.schedule for each in profiles]
    assert all(each.far for each in orders)
    assert orders[0] != orders[1]
    slow = profile_of(GRAPH, [1.0] * 8, far_s_per_byte=1.0)
    assert not found(slow, with_cores(CAP)).plan.offloads


@pytest.mark.parametrize("more", [{"recompute": True}, {"schedule": "one_f_one_b"}])
def test_what_is_fixed_is_kept(more):
    profile = profile_of(GRAPH, [1.0] * 8, far_s_per_byte=1 / 400)
    assert not any(
        each.plan.offloads for each in found(profile, with_cores(CAP), **more).candidates
    )
