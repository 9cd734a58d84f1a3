"""Orders with copies are found again for the seconds of a run."""

from dataclasses import replace
from statistics import fmean

import pytest

from penstock.cluster import Link
from penstock.errors import PlanError
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.schedule import Schedule, peak_activations
from penstock.simulate.again import copies_again, measured
from penstock.simulate.simulate import simulate
from penstock.simulate.what_if import measured_run, what_if
from tests.graph.tiny import GRAPH
from tests.schedule.test_listed_copies import BEHIND, costs
from tests.simulate.fake_run import plain
from tests.simulate.strategies import one_host
from tests.simulate.test_what_if import PROFILE, plan_of, run_of

TIMES = [[5, 3], [2, 4], [1, 6], [4, 2], [7, 3]]  # F, I, W, there and back, by stage


def run_with(times, schedule):
    plan = plan_by_hand(GRAPH, (0,), schedule)
    cluster = one_host(2, Link(0.0, 1e15))
    timeline = simulate(lower_plan(plan, GRAPH), costs(2, times), cluster)
    told = replace(timeline, meta=(("clock", "measured"),))
    return measured_run(plan, GRAPH, told, PROFILE)


def test_seconds_are_those_of_the_run_and_an_order_for_them_is_no_longer():
    run = run_with(TIMES, Schedule.parse(BEHIND))
    found = measured(run)
    assert sum(found.seconds[:3], ()) == pytest.approx((5, 3, 2, 4, 1, 6))
    assert sum(found.copies, ()) == pytest.approx((4, 0, 7, 0)), (
        "stage 1 copied nothing: as the profile says"
    )
    assert found.limit == max(peak_activations(run.plan.schedule)) == 3
    ((words, change),) = copies_again(run)
    assert words == "copies found again for these seconds"
    assert max(peak_activations(change.schedule)) <= 3
    assert what_if(run, change).step_s < run.replayed_s


def test_a_run_without_copies_has_seconds_too_but_no_copies_to_find_again():
    run = run_of(plan_of(), plain(0))
    found = measured(run)
    for stage in range(2):
        own = [one for one in run.timeline.spans if one.stage == stage and one.lane == "compute"]
        mean = {
            kind: fmean(one.end_s - one.start_s for one in own if one.kind == kind) for kind in "FB"
        }
        assert found.seconds.forward_s[stage] == pytest.approx(mean["F"])
        both_s = found.seconds.input_s[stage] + found.seconds.weights_s[stage]
        assert both_s == pytest.approx(mean["B"])
    assert found.limit == 2
    assert list(copies_again(run)) == []
    loop = plan_by_hand(GRAPH, (0,), "gpipe", num_micro_batches=4, num_ranks=2)
    away = loop.changed(offload=("both", "activations"), beside=True)
    rests = measured(run._replace(plan=away))
    assert rests.seconds == found.seconds
    with pytest.raises(PlanError, match="2 stages on 2 ranks, by pipedream"):
        measured(run_of(plan_of("pipedream"), plain(0), num_steps=2))
