"""Seconds that one more step of a plan adds to a long run, by simulation."""

from operator import sub

import pytest

from penstock.plan import plan_by_hand, schedule_of
from penstock.schedule import SCHEDULES, steady_s
from penstock.schedule.recipe import name_of
from penstock.search import Fixed, RankExchange, drained_s, evaluate, search
from penstock.timeline import breakdown_of
from penstock.units import format_seconds
from tests.search.chains import cluster_of
from tests.simulate.test_suited import GRAPH, LAYERS_S, PROFILE, seconds_of

NAMES = [
    builder.__name__
    for builder in SCHEDULES
    if builder.__name__ != "forward_only" and not builder(2, 2).has_updates
]
BASIS = GRAPH, PROFILE, cluster_of(8)


def both(plan):
    """Return the seconds of a step alone, and those that it adds to a long run."""
    return drained_s(*BASIS, plan), evaluate(*BASIS, plan)[0].step_s


@pytest.mark.parametrize("name", NAMES)
def test_plan_takes_as_long_as_its_schedule_for_the_seconds_of_its_stages(name):
    cuts = [0, 2, 3]
    plan = plan_by_hand(GRAPH, cuts, name, num_micro_batches=6)
    found, timeline = evaluate(*BASIS, plan)
    seconds = seconds_of(cuts, split=True)._replace(message_s=0.0)
    expected = steady_s(schedule_of(found.plan), seconds)
    assert found.step_s == pytest.approx(expected, rel=1e-6)
    assert found.step_s <= drained_s(*BASIS, plan) * (1 + 1e-9)
    spans, own = timeline.spans, timeline.spans.working()
    mine = [own & (spans.ranks == rank) for rank in range(timeline.num_ranks)]
    begun = [spans.starts_s[each].min() for each in mine]
    over = [spans.ends_s[each].max() for each in mine]
    assert min(begun) == 0.0
    assert max(map(sub, over, begun)) <= found.step_s * (1 + 1e-6)  # then the next one begins
    wall_s = breakdown_of(timeline, found.step_s).wall_s
    assert wall_s == pytest.approx([found.step_s] * timeline.num_ranks)


def test_norm_that_clips_is_a_barrier():
    plan = plan_by_hand(GRAPH, [0, 1, 2, 3, 4], "zb_h2", num_micro_batches=12)
    alone_s, steady = both(plan)
    assert steady < alone_s - 0.01  # the first rank begins its next step
    clipped_s, steady = both(plan.changed(clip=True))
    assert steady == pytest.approx(clipped_s)


def test_norm_that_is_known_after_the_update_is_none():
    plan = plan_by_hand(GRAPH, [0, 1, 2, 3, 4], "zb_h2", num_micro_batches=12)
    _, free = both(plan)
    assert both(plan.changed(clip=True, post_validation=True))[1] == pytest.approx(free)


def asked(schedule: str, *, post_validation: bool):
    """Return the plan of a search that clips, and what it says of post-validation, if anything."""
    fixed = Fixed(
        ranks=4, stages=4, schedule=schedule, exchange=RankExchange(post_validation=post_validation)
    )
    plan = search(*BASIS, micro_batches=8, clip=True, fixed=fixed).plan
    return plan, [each for each in plan.decisions if each.what == "post-validation"]


def test_search_says_what_waiting_for_the_norm_costs():
    plan, (said,) = asked("zb_h2", post_validation=False)
    assert not plan.agreement.post_validation
    assert said.value == "no"
    assert said.why.endswith("per step of a long run: post_validation")
    free_s, waits_s = (format_seconds(both(plan.changed(clip=clip))[1]) for clip in (False, True))
    assert f"{free_s} in place of {waits_s}" in said.why
    plan, (said,) = asked("zb_h2", post_validation=True)
    assert (plan.agreement.post_validation, said.value, said.by) == (True, "yes", "user")
    assert f"{free_s} in place of {waits_s}" in said.why


def test_search_is_silent_where_nothing_is_gained():
    assert asked("one_f_one_b", post_validation=False)[1] == []


def test_search_ranks_plans_by_a_long_run():
    def found(*, clip: bool):
        """Return the best but for layer_pipe, which is as good when it drains."""
        fixed = Fixed(ranks=4, replicas=1, stages=6)
        tried = search(*BASIS, micro_batches=3, clip=clip, fixed=fixed, prune=False).candidates
        own = (one for one in tried if name_of(one.plan.schedule).partition("(")[0] != "layer_pipe")
        return min(own, key=lambda one: one.step_s)

    free, clipped = found(clip=False), found(clip=True)
    alone_s, steady = both(free.plan)
    other_s, other = both(clipped.plan.changed(clip=False))  # the best that drains
    assert steady == free.step_s < other - 0.01
    assert alone_s > other_s + 0.05


def test_unlike_shares_and_inference_have_a_long_run_too():
    alone_s, steady = both(plan_by_hand(GRAPH, [2], "forward_only", num_micro_batches=4))
    assert steady == pytest.approx(4 * sum(LAYERS_S[:3]), rel=1e-6)  # its slower stage
    assert steady < alone_s
    unlike = plan_by_hand(GRAPH, [1, 3], "zb_h2", num_micro_batches=9, replicas=2, shares=(9, 6))
    alone_s, steady = both(unlike)
    assert steady <= alone_s
