"""What if: answers about plans, what they rest on, and questions that have no answer."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import PlanError, ProfileError, ScheduleError, TimelineError
from penstock.graph.graph import CutPoint, Graph, Node
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.program.codes import JOINS, WORKS
from penstock.program.lower import chain, lower
from penstock.schedule import gpipe, one_f_one_b
from penstock.schedule.orders import KINDS, Kind
from penstock.simulate import Recorded, record, simulate
from penstock.simulate.carry import _sums, carried
from penstock.simulate.price import costs_of
from penstock.simulate.what_if import (
    WINDOW,
    Change,
    Run,
    balanced,
    changed,
    measured_run,
    scaled,
    usual_changes,
    what_if,
)
from penstock.timeline import Timeline, step_s
from tests.graph.tiny import GRAPH
from tests.kinds import kind_s
from tests.program.lowering import lower_schedule
from tests.search.chains import costless, with_costs
from tests.simulate.fake_run import Truth, drawn, fake_run, plain
from tests.simulate.strategies import one_host
from tests.simulate.test_measured_seconds import runs, same_times, seeds

PROFILE = with_costs(costless(GRAPH.digest, (1.0,) * len(GRAPH.nodes)), update_s=1.0)


def plan_of(schedule: str = "one_f_one_b", micro_batches: int = 4, replicas: int = 1) -> Plan:
    return plan_by_hand(GRAPH, (0,), schedule, num_micro_batches=micro_batches, replicas=replicas)


def run_of(plan: Plan, truth: Truth, profile: Profile | None = PROFILE, **more: object) -> Run:
    program = lower_plan(plan, GRAPH, **more)
    return measured_run(plan, GRAPH, fake_run(program, truth), profile)


def alike(seed: int) -> Truth:
    """Return seconds that all micro-batches share."""
    return plain(seed)._replace(work=lambda _, kind, stage, number: drawn(seed, kind, stage))


@given(seeds, st.sampled_from(["gpipe", "dapple", "list_schedule"]))
def test_another_schedule_of_a_plan_is_the_run_of_the_plan_with_it(seed: int, schedule: str):
    truth = plain(seed)
    run = run_of(plan_of(), truth, None)
    answer = what_if(run, Change(schedule=schedule))
    other = fake_run(lower_plan(plan_of(schedule), GRAPH), truth)
    assert answer.step_s == pytest.approx(step_s(other))
    assert answer.ratio == pytest.approx(step_s(other) / step_s(run.timeline))
    assert answer.rests_on == ()


@given(seeds, st.integers(1, 9), st.integers(1, 2))
def test_ratio_of_more_micro_batches_is_of_the_seconds_for_each(
    seed: int, micro_batches: int, replicas: int
):
    truth = alike(seed)
    run = run_of(plan_of(replicas=replicas), truth)
    answer = what_if(run, Change(num_micro_batches=micro_batches))
    other = fake_run(lower_plan(plan_of("one_f_one_b", micro_batches, replicas), GRAPH), truth)
    assert answer.step_s == pytest.approx(step_s(other))
    each = (step_s(other) / micro_batches) / (step_s(run.timeline) / 4)
    assert answer.ratio == pytest.approx(each)


@given(seeds)
def test_no_change_is_the_replayed_step(seed: int):
    run = run_of(plan_of(), plain(seed))
    answer = what_if(run, Change())
    assert answer.step_s == run.replayed_s == pytest.approx(step_s(run.timeline))
    assert (answer.ratio, answer.rests_on) == (1.0, ())


@given(seeds, st.integers(1, 4))
def test_window_of_several_steps_is_told_per_step(seed: int, num_steps: int):
    run = run_of(plan_of("double_buffered"), alike(seed), num_steps=num_steps)
    assert run.program.num_steps == num_steps
    assert run.replayed_s == pytest.approx(step_s(run.timeline) / num_steps)
    answer = what_if(run, Change(schedule="one_f_one_b"))
    drained = fake_run(lower_plan(plan_of(), GRAPH), alike(seed))
    assert answer.step_s == pytest.approx(step_s(drained))


def test_asynchronous_schedule_is_asked_over_a_window():
    truth = alike(0)
    answer = what_if(run_of(plan_of(), truth), Change(schedule="double_buffered"))
    program = lower_plan(plan_of("double_buffered"), GRAPH, num_steps=WINDOW)
    assert answer.step_s == pytest.approx(step_s(fake_run(program, truth)) / WINDOW)
    assert "copies of weights as free" in answer.rests_on


def test_window_of_other_length_takes_means_and_not_its_first_micro_batches():
    """The first of a window are slow here; a step that drains is not made of them alone."""

    def work(_: int, kind: str, stage: int, number: int) -> float:
        return 5.0 if kind == "F" and number == 0 else 1.0

    truth = plain(0, 0.0)._replace(work=work)
    run = run_of(plan_of("double_buffered"), truth, num_steps=4)
    answer = what_if(run, Change(schedule="one_f_one_b"))
    assert sum(kind_s(answer.timeline, "F")) == pytest.approx(2 * 4 * (1 + 4 / 16))
    assert answer.rests_on == ("the mean of a stage over the steps that were run",)


def test_backward_is_divided_as_the_profile_says():
    """Of stage 0, B is one op of W; of stage 1, one of I: nothing of the other."""
    run = run_of(plan_of(), plain(1))
    answer = what_if(run, Change(schedule="zb_h1"))
    assert answer.rests_on == ("I and W as the profile divides B",)
    seconds = {kind: kind_s(answer.timeline, kind) for kind in ("I", "W")}
    ran = kind_s(run.timeline, "B")
    assert seconds["W"] == pytest.approx((ran[0], 0.0))
    assert seconds["I"] == pytest.approx((0.0, ran[1]))


def test_backward_is_not_divided_without_a_profile():
    run = run_of(plan_of(), plain(1), None)
    with pytest.raises(ProfileError, match="B of stage 0 was recorded, and no profile says"):
        what_if(run, Change(schedule="zb_h1"))
    run = run_of(plan_of("zb_h1"), plain(1), None)
    with pytest.raises(ProfileError, match="IW of stage 0 was recorded"):
        what_if(run, Change(schedule="gpipe"))


@given(seeds)
def test_balanced_stages_take_equally_long(seed: int):
    run = run_of(plan_of(), plain(seed))
    timeline = what_if(run, balanced(run)).timeline
    first, second = np.sum([kind_s(timeline, kind) for kind in ("F", "B")], axis=0)
    assert first == pytest.approx(second)
    whole = sum(sum(kind_s(run.timeline, kind)) for kind in ("F", "B"))
    assert first + second == pytest.approx(whole)


def test_gathers_of_shards_are_among_the_collectives_that_links_make_faster():
    program = lower_plan(plan_of(replicas=2).changed(shard=("shard", "shard")), GRAPH)
    joins, works = (int(of[program.code.op].sum()) for of in (JOINS, WORKS))
    recorded = Recorded(np.ones(works), np.ones(joins), None, np.zeros(program.num_ranks))
    found = scaled(program, recorded, Change(links=2.0)).sum_s
    assert found.tolist() == [0.5] * joins
    carried, _ = _sums(program, recorded, program, None)
    assert carried.tolist() == [1.0] * joins


def test_usual_questions_are_links_ranks_balance_and_schedules_that_fit():
    asked = dict(usual_changes(run_of(plan_of(), plain(0))))
    words = ["free links", "rank 0 1.1 times faster", "rank 1 1.1 times faster"]
    assert list(asked)[:4] == [*words, "all stages equally long"]
    schedules = [change.schedule for change in asked.values() if change.schedule]
    assert {"gpipe", "zb_h1"} <= set(schedules)
    assert not {"one_f_one_b", "forward_only", "double_buffered"} & set(schedules)


KEEPS = Graph(  # mean(tanh(x @ w)): B of the first stage needs what tanh returned
    key=("batch: float32[3, 2]",),
    nodes=(
        Node("w", "parameter", "", (), (2, 2), "float32", 16, 0),
        Node("batch.0", "input", "", (), (3, 2), "float32", 24, 1),
        Node("scale", "scale", "", (), (), "float32", 4, 2),
        Node("mm", "op", "aten.mm.default", (1, 0), (3, 2), "float32", 24, 3, flop=24),
        Node("tanh", "op", "aten.tanh.default", (3,), (3, 2), "float32", 24, 4, flop=6),
        Node("mean", "op", "aten.mean.default", (4,), (), "float32", 4, 5, flop=1),
        Node("expand", "op", "aten.expand.default", (2,), (3, 2), "float32", 24, 2, "B", 5),
        Node("to_mm", "op", "aten.tanh_backward.default", (6, 4), (3, 2), "float32", 24, 6, "B", 4),
        Node("to_w", "op", "aten.mm.default", (1, 7), (2, 2), "float32", 16, 7, "B", 3, 24),
    ),
    loss=5,
    gradients={"w": 8},
    cut_points=(CutPoint("after tanh", 5, 24),),
    samples=3,
    tokens=0,
)


@pytest.mark.parametrize("asked", [None, "zb_h1"])
def test_backward_that_repeats_forward_is_the_run_of_the_plan_that_says_so(asked: str | None):
    """And back again; ops take what the profile says, thrice as long on this machine."""
    profile = replace(PROFILE, graph=KEEPS.digest, op_s=(1.0,) * 9, workspace_bytes=(0,) * 9)
    plan = plan_by_hand(KEEPS, (0,), "one_f_one_b", num_micro_batches=4)
    again = plan.changed(recompute=(True, True), schedule=asked or plan.schedule)

    def ran(of: Plan) -> Run:
        seconds = costs_of(KEEPS, stages_of(of, KEEPS), profile).action_s

        def work(_: int, kind: Kind, stage: int, number: int) -> float:
            return 3 * float(seconds[KINDS.index(kind), stage, 0])

        timeline = fake_run(lower_plan(of, KEEPS), plain(5)._replace(work=work))
        return measured_run(of, KEEPS, timeline, profile)

    run, would = ran(plan), ran(again)
    answer = what_if(run, Change(recompute=True, schedule=asked))
    assert answer.step_s == pytest.approx(would.replayed_s)
    assert "what B repeats, as the profile has it" in answer.rests_on
    whole = what_if(run, Change(recompute=True)).step_s - run.replayed_s
    assert whole == pytest.approx(24, abs=1)  # two ops of 3 s more for each of 4 micro-batches
    back = what_if(would, Change(recompute=False)).step_s
    assert back == pytest.approx(ran(again.changed(recompute=(False, False))).replayed_s)


def test_what_a_backward_repeats_is_asked_where_a_profile_tells_what_it_takes():
    asked = dict(usual_changes(run_of(plan_of(), plain(0))))
    assert asked["all of F repeated in B"] == Change(recompute=True)
    assert "nothing of F repeated in B" not in asked
    assert not any(c.recompute for _, c in usual_changes(run_of(plan_of(), plain(0), None)))
    with pytest.raises(ProfileError, match="there is no profile"):
        what_if(run_of(plan_of(), plain(0), None), Change(recompute=True))


def test_run_without_a_backward_or_without_a_pipeline_is_asked_for_no_other_schedule():
    alone = plan_by_hand(GRAPH, (), "one_f_one_b", num_micro_batches=2, replicas=2)
    for plan in (plan_of("forward_only"), alone):
        asked = dict(usual_changes(run_of(plan, plain(0))))
        assert "free links" in asked
        assert not any(change.schedule for change in asked.values())


def test_sum_that_was_not_run_takes_what_the_link_says():
    """Chimera has both stages on both ranks, so their gradients are summed.

    That of stage 1, the smaller one, runs beside the last backward of stage 0.
    """
    cluster = one_host(2, Link(1.0, 16.0))
    plan = plan_of()
    measured = fake_run(lower_plan(plan, GRAPH), plain(0))
    linked = measured_run(plan, GRAPH, measured, PROFILE, cluster)
    free = measured_run(plan, GRAPH, measured, PROFILE)
    answers = [what_if(run, Change(schedule="chimera")) for run in (linked, free)]
    assert all("sums that were not run as the link says" in a.rests_on for a in answers)
    small_s, large_s = (cluster.all_reduce_s(size, (0, 1)) for size in (0, 16))
    hidden_s = answers[1].step_s + small_s + large_s - answers[0].step_s
    assert 0.0 < hidden_s <= small_s


def test_stage_on_a_device_that_did_not_run_it_has_no_answer():
    kinds = tuple(DeviceKind(name, 1, (), 1.0) for name in ("a", "b"))
    link = Link(0.0, 1.0)
    cluster = Cluster(kinds, (Host("h", "a", 1), Host("i", "b", 1)), link, link)
    plan = plan_of()
    measured = fake_run(lower_plan(plan, GRAPH), plain(0))
    run = measured_run(plan, GRAPH, measured, PROFILE, cluster)
    assert what_if(run, Change(schedule="gpipe")).step_s > 0
    with pytest.raises(PlanError, match="stage 0 would be on a b, and was not run there"):
        what_if(run, Change(schedule="chimera"))


def test_questions_that_make_no_sense_are_refused():
    run = run_of(plan_of(), plain(0))
    with pytest.raises(PlanError, match="0 times faster cannot be"):
        Change(links=0.0)
    with pytest.raises(PlanError, match="-1 times faster cannot be"):
        Change(ranks=((0, -1.0),))
    with pytest.raises(PlanError, match="nan times faster cannot be"):
        Change(kinds=(("F", float("nan")),))
    with pytest.raises(PlanError, match="under way -1 s longer"):
        Change(latency_s=-1.0)
    with pytest.raises(PlanError, match="a step of 0 micro-batches"):
        Change(num_micro_batches=0)
    with pytest.raises(PlanError, match="there is no rank 2"):
        what_if(run, Change(ranks=((2, 2.0),)))
    with pytest.raises(PlanError, match="there is no stage -1"):
        what_if(run, Change(stages=((-1, 2.0),)))
    with pytest.raises(PlanError, match="links of 1 ranks for a run of 2"):
        what_if(run, Change(cluster=one_host(1, Link(0.0, 1.0))))
    with pytest.raises(ScheduleError, match="there is no schedule 'zb'"):
        what_if(run, Change(schedule="zb"))


def test_change_says_in_words_what_it_is():
    assert str(Change()) == "nothing else"
    change = Change(ranks=((0, 2.0),), links=float("inf"), latency_s=0.002, num_micro_batches=3)
    words = "3 micro-batches, rank 0 2 times faster, free links, messages 2 ms longer under way"
    assert str(change) == words


# -- what cannot be replayed


def test_timeline_that_is_not_measured_is_refused():
    program = lower_schedule(gpipe(2, 1), edges=chain(2, size_bytes=1))
    simulated = simulate(program, lambda action: 1.0, one_host(2, Link(0.0, 1.0)))
    with pytest.raises(TimelineError, match="was not measured by a run"):
        record(program, simulated)
    measured = fake_run(program, plain(0))
    unsent = [span for span in measured.spans if span.lane != "send"]
    with pytest.raises(TimelineError, match=r"rank 0 of the timeline lacks F0\.0>r1e0s0"):
        record(program, Timeline.of(2, unsent, meta=measured.meta))


def test_timeline_of_another_plan_is_refused():
    measured = fake_run(lower_plan(plan_of(), GRAPH), plain(0))
    with pytest.raises(TimelineError, match=r"rank 0 of the timeline lacks F0\.4"):
        measured_run(plan_of(micro_batches=5), GRAPH, measured)
    other = plan_of("gpipe")
    with pytest.raises(TimelineError, match=r"does B0\.0 before F0\.3 on rank 0"):
        measured_run(other, GRAPH, measured)


@given(runs(), seeds)
def test_program_that_lacks_a_kind_is_no_ground_for_one_that_has_it(program, seed):
    recorded = record(program, fake_run(program, plain(seed)))
    other = lower(one_f_one_b(program.num_stages + 1, 1))
    with pytest.raises(ValueError, match="of the same stages"):
        carried(program, recorded, other)
    with pytest.raises(ValueError, match="of the same stages"):
        carried(program, replace(recorded, message_s=None), program)


def test_recorded_seconds_that_do_not_fit_the_program_are_refused():
    program = lower(gpipe(2, 1))
    right = record(program, fake_run(program, plain(0)))
    for name, entries in (("work_s", 6), ("start_s", 2), ("message_s", 2)):
        wrong = replace(right, **{name: np.zeros((3, 3) if name == "message_s" else 3)})
        message = f"{name} has 3 entries; this program needs {entries}"
        with pytest.raises(ValueError, match=message):
            simulate(program, wrong)
    with pytest.raises(ValueError, match="sum_s has 1 entries; this program needs 0"):
        simulate(program, replace(right, sum_s=[1.0]))
    with pytest.raises(ValueError, match=r"work_s\[1\] is -1\.0 s"):
        replace(right, work_s=[0.0, -1.0])
    with pytest.raises(ValueError, match=r"message_s has shape \(2,\)"):
        replace(right, message_s=[0.0, 1.0])
    with pytest.raises(ValueError, match="there is a cluster; only one can say"):
        simulate(program, right, one_host(2, Link(0.0, 1.0)))


def test_recorded_seconds_leave_messages_to_a_cluster():
    program = lower_schedule(one_f_one_b(2, 3), edges=chain(2, size_bytes=4))
    recorded = Recorded(np.ones(14), np.zeros(0), None, np.zeros(2))
    cluster = one_host(2, Link(0.5, 8.0))
    updates = simulate(program, recorded, cluster)
    computes = simulate(program, lambda action: 1.0, cluster)
    assert step_s(updates) == step_s(computes) + 1.0
    assert not same_times(updates, simulate(program, recorded))


@given(seeds)
def test_another_schedule_of_units_has_the_same_units(seed: int):
    truth = plain(seed)
    run = run_of(plan_of().changed(schedule="one_f_one_b / units 1 1"), truth, None)
    expected = plan_of().changed(schedule="gpipe / units 1 1")
    assert changed(run, Change(schedule="gpipe")) == expected
    assert "gpipe / units 1 1" in dict(usual_changes(run))
