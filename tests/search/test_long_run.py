"""Seconds that one more step of a plan adds to a long run, by simulation."""

from dataclasses import replace

import pytest

from penstock.plan import plan_by_hand, schedule_of
from penstock.schedule import SCHEDULES, steady_s
from penstock.search import Fixed, evaluate, long_run_s, search
from penstock.units import format_seconds
from tests.search.chains import cluster_of
from tests.simulate.test_suited import GRAPH, PROFILE, seconds_of

NAMES = [
    builder.__name__
    for builder in SCHEDULES
    if builder.__name__ != "forward_only" and not builder(2, 2).has_updates
]
BASIS = GRAPH, PROFILE, cluster_of(8)


def both(plan):
    found, _ = evaluate(*BASIS, plan)
    return found.step_s, long_run_s(*BASIS, found.plan, found)


@pytest.mark.parametrize("name", NAMES)
def test_plan_takes_as_long_as_its_schedule_for_the_seconds_of_its_stages(name):
    cuts = [0, 2, 3]
    plan = plan_by_hand(GRAPH, cuts, name, num_micro_batches=6)
    found, _ = evaluate(*BASIS, plan)
    seconds = seconds_of(cuts, split=True)._replace(message_s=0.0)
    expected = steady_s(schedule_of(found.plan), seconds)
    assert long_run_s(*BASIS, found.plan, found) == pytest.approx(expected, rel=1e-6)


def test_norm_that_clips_is_a_barrier():
    plan = plan_by_hand(GRAPH, [0, 1, 2, 3, 4], "zb_h2", num_micro_batches=12)
    drained_s, steady = both(plan)
    assert steady < drained_s - 0.01  # the first rank begins its next step
    clipped_s, steady = both(replace(plan, clip=True))
    assert steady == pytest.approx(clipped_s)


def test_norm_that_is_known_after_the_update_is_none():
    plan = plan_by_hand(GRAPH, [0, 1, 2, 3, 4], "zb_h2", num_micro_batches=12)
    _, free = both(plan)
    assert both(replace(plan, clip=True, post_validation=True))[1] == pytest.approx(free)


def asked(schedule: str, *, post_validation: bool):
    """Return the plan of a search that clips, and what it says of post-validation, if anything."""
    fixed = Fixed(ranks=4, stages=4, schedule=schedule, post_validation=post_validation)
    plan = search(*BASIS, micro_batches=8, clip=True, fixed=fixed).plan
    return plan, [each for each in plan.decisions if each.what == "post-validation"]


def test_search_says_what_waiting_for_the_norm_costs():
    plan, (said,) = asked("zb_h2", post_validation=False)
    assert not plan.post_validation
    assert said.value == "no"
    assert said.why.endswith("per step of a long run: --post-validation")
    free_s, waits_s = (format_seconds(both(replace(plan, clip=clip))[1]) for clip in (False, True))
    assert f"{free_s} in place of {waits_s}" in said.why
    plan, (said,) = asked("zb_h2", post_validation=True)
    assert (plan.post_validation, said.value, said.by) == (True, "yes", "user")
    assert f"{free_s} in place of {waits_s}" in said.why


def test_search_is_silent_where_nothing_is_gained():
    assert asked("one_f_one_b", post_validation=False)[1] == []


def test_asynchronous_plan_has_one_figure_and_others_none():
    late_s, steady = both(plan_by_hand(GRAPH, [2], "pipedream", num_micro_batches=4))
    assert late_s == steady
    assert both(plan_by_hand(GRAPH, [2], "forward_only", num_micro_batches=4))[1] is None
    unlike = plan_by_hand(GRAPH, [1, 3], "zb_h2", num_micro_batches=9, replicas=2, shares=(9, 6))
    assert both(unlike)[1] is None
