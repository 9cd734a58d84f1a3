"""Fed: a step whose rank waited for data is, without that, the step that would have been run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plan.lower_plan import lower_plan
from penstock.simulate.what_if import Change, measured_run, usual_changes, what_if
from penstock.timeline import Timeline, step_s
from tests.graph.tiny import GRAPH
from tests.simulate.fake_run import Truth, fake_run, plain
from tests.simulate.test_measured_seconds import seeds
from tests.simulate.test_what_if import plan_of

MICRO_BATCHES = 4


def reads(kind: str, stage: int) -> bool:
    return (kind, stage) == ("F", 0)


def late(truth: Truth, data_s: float) -> Truth:
    """Return seconds in which forwards of the first stage take `data_s` more."""

    def work(rank: int, kind: str, stage: int, number: int) -> float:
        return truth.work(rank, kind, stage, number) + data_s * reads(kind, stage)

    return truth._replace(work=work)


def shown(timeline: Timeline, data_s: float) -> Timeline:
    """Return the timeline as a run shows it: what is waited for data is no part of a span."""
    spans = (
        span._replace(start_s=span.start_s + data_s)
        if span.lane == "compute" and reads(span.kind, span.stage)
        else span
        for span in timeline.spans
    )
    return Timeline.of(timeline.num_ranks, spans, meta=(("clock", "measured"),))


@given(seeds, st.sampled_from([0.5, 3.0]), st.sampled_from([1.0, 2.0, float("inf")]))
def test_data_that_come_faster_give_the_step_that_waits_so_much_less(seed, data_s, times):
    truth, plan = plain(seed), plan_of(micro_batches=MICRO_BATCHES)
    program = lower_plan(plan, GRAPH)
    timeline = shown(fake_run(program, late(truth, data_s)), data_s)
    seen_s = (MICRO_BATCHES - 1) * data_s  # the first wait is before the window
    run = measured_run(plan, GRAPH, timeline, data_s=(seen_s, 0.0))
    expected = shown(fake_run(program, late(truth, data_s / times)), data_s / times)
    answer = what_if(run, Change(data=times))
    assert answer.step_s == pytest.approx(step_s(expected))


@given(seeds)
def test_no_more_is_taken_than_ranks_have_waited(seed):
    truth, plan = plain(seed), plan_of(micro_batches=MICRO_BATCHES)
    timeline = shown(fake_run(lower_plan(plan, GRAPH), late(truth, 1.0)), 1.0)
    run = measured_run(plan, GRAPH, timeline, data_s=(1.5, 0.0))
    waited = run.waits_s[run.waits_s > 0]
    assert waited.tolist() == pytest.approx([0.5] * (MICRO_BATCHES - 1))


def test_waiting_for_data_is_asked_for_first_where_a_rank_has_waited():
    plan = plan_of(micro_batches=MICRO_BATCHES)
    timeline = shown(fake_run(lower_plan(plan, GRAPH), late(plain(1), 1.0)), 1.0)
    waits = measured_run(plan, GRAPH, timeline, data_s=(3.0, 0.0))
    assert next(iter(usual_changes(waits)))[0] == "no wait for data"
    words = [text for text, _ in usual_changes(measured_run(plan, GRAPH, timeline))]
    assert "no wait for data" not in words
