"""Breakdowns sum to the wall time, and the bottleneck follows its written rule."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TimelineError
from penstock.program.lower import lower
from penstock.schedule import find
from penstock.simulate import simulate
from penstock.timeline import (
    PARTS,
    Breakdown,
    LinkUse,
    Meetings,
    Part,
    Sent,
    Span,
    Spent,
    Taken,
    Timeline,
    bottleneck,
    breakdown_from_json,
    breakdown_of,
    breakdown_of_ranks,
    busy_s,
    parts_table,
    step_s,
)
from penstock.timeline.bottleneck import CAUSE, FLAG
from penstock.timeline.breakdown import WORK, covered_s
from penstock.typed import typed
from tests.kinds import kind_s

PIPELINES = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2", "interleaved", "double_buffered")
seconds = st.just(0.0) | st.floats(1e-6, 1e3)


def broken(*ranks: dict[Part, float], steps: int = 1, links: tuple[LinkUse, ...] = ()) -> Breakdown:
    """Return a breakdown of ranks with these parts."""
    rows = tuple(tuple(rank.get(part, 0.0) for part in PARTS) for rank in ranks)
    return Breakdown(steps, tuple(map(sum, rows)), rows, links)


@st.composite
def breakdowns(draw: st.DrawFn) -> Breakdown:
    ranks = draw(st.integers(1, 6))
    row = st.fixed_dictionaries(dict.fromkeys(PARTS, seconds))
    link = st.builds(LinkUse, *[st.integers(0, ranks - 1)] * 2, seconds, seconds)
    rows = draw(st.lists(row, min_size=ranks, max_size=ranks))
    return broken(
        *rows,
        steps=draw(st.integers(1, 9)),
        links=tuple(draw(st.lists(link, max_size=3))),
    )


# --- the record --------------------------------------------------------------------------------


@given(breakdowns())
def test_breakdown_comes_back_from_json_as_it_was(one):
    assert breakdown_from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize(
    "change",
    [
        {"parts": ["F"]},
        {"num_steps": 0},
        {"num_steps": 1.0},
        {"wall_s": [1.0]},
        {"wall_s": [1.0, "2"]},
        {"wall_s": []},
        {"seconds": [[1.0], [1.0]]},
        {"seconds": [[0.0] * 13, [0.0] * 13]},
        {"seconds": [[2.0, -1.0, *[0.0] * 11], [1.0, *[0.0] * 12]]},
        {"seconds": None},
        {"links": [[0, 2, 1.0, 1.0]]},
        {"links": [[0, 1, math.nan, 1.0]]},
        {"links": [[0, 1]]},
        {"links": 3},
    ],
    ids=str,
)
def test_damaged_breakdown_is_refused(change):
    good = broken({"F": 1.0}, {"F": 1.0}).to_json()
    assert breakdown_from_json(good) == broken({"F": 1.0}, {"F": 1.0})
    with pytest.raises(TimelineError):
        breakdown_from_json({**good, **change})


@pytest.mark.parametrize("content", [None, [], 3, "text", {}])
def test_what_is_no_breakdown_is_refused(content):
    with pytest.raises(TimelineError):
        breakdown_from_json(content)


@given(breakdowns())
def test_step_is_the_slowest_ranks_wall_time_less_what_happens_once(one):
    steps = [
        (wall_s - once_s) / one.num_steps
        for wall_s, once_s in zip(one.wall_s, one.of("once"), strict=True)
    ]
    assert one.step_s == max(steps)
    parts = [one.of(part) for part in PARTS if part != "once"]
    assert [sum(row) for row in zip(*parts, strict=True)] == pytest.approx(steps, abs=1e-9)


# --- of ranks ----------------------------------------------------------------------------------


def met(ranks, *each_s):
    return Meetings(ranks, sum(each_s), each_s)


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=2, max_size=5))
def test_parts_of_ranks_sum_to_their_wall_times(ranks):
    spent = [
        Spent(
            2,
            2 * sum(rank) + 1.0,
            (("F", rank[0]), ("data", rank[1])),
            (met(tuple(range(len(ranks))), rank[2]), met((at,), 0.5)),
            checkpoint_s=rank[3],
        )
        for at, rank in enumerate(ranks)
    ]
    found = breakdown_of_ranks(spent)
    for rank, one in enumerate(spent):
        assert sum(found.seconds[rank]) == pytest.approx(one.wall_s)
        assert min(found.seconds[rank]) >= -1e-9
    least = min(rank[2] for rank in ranks)
    assert found.of("collectives") == pytest.approx([(least + 0.5) / 2] * len(ranks))
    assert found.of("checkpoint") == (min(rank[3] for rank in ranks) / 2,) * len(ranks)
    beyond = [(rank[2] - least + rank[3]) / 2 - found.of("checkpoint")[0] for rank in ranks]
    assert found.of("meeting") == pytest.approx(beyond, abs=1e-9)


def test_sums_over_different_ranks_are_told_apart():
    """Ranks 0 and 1 wait for rank 2 in the sum of all, and not in that of their own."""
    every, own = (0, 1, 2), (0, 1)
    spent = [
        Spent(1, 20.0, (), (met(every, 9.0), met(own, 2.0))),
        Spent(1, 20.0, (), (met(every, 9.0), met(own, 3.0))),
        Spent(1, 20.0, (), (met(every, 1.0),)),
    ]
    found = breakdown_of_ranks(spent)
    assert found.of("collectives") == (3.0, 3.0, 1.0)
    assert found.of("meeting") == (8.0, 9.0, 0.0)


def test_ranks_that_are_last_by_turns_wait_for_each_other():
    spent = [
        Spent(1, 20.0, (), (met((0, 1), 1.0, 8.0),)),
        Spent(1, 20.0, (), (met((0, 1), 6.0, 1.0),)),
    ]
    found = breakdown_of_ranks(spent)
    assert found.of("collectives") == (2.0, 2.0)
    assert found.of("meeting") == (7.0, 5.0)


def test_sample_tells_the_part_of_all_sums_that_is_waiting():
    spent = [
        Spent(1, 40.0, (), (Meetings((0, 1), 30.0, (1.0, 4.0)),)),
        Spent(1, 40.0, (), (Meetings((0, 1), 10.0, (3.0, 2.0)),)),
    ]
    found = breakdown_of_ranks(spent)
    assert found.of("collectives") == pytest.approx((30.0 * 3 / 5, 10.0 * 3 / 5))
    assert found.of("meeting") == pytest.approx((30.0 * 2 / 5, 10.0 * 2 / 5))


def test_ranks_that_met_unequally_often_have_no_breakdown():
    spent = [
        Spent(1, 20.0, (), (met((0, 1), 1.0, 8.0),)),
        Spent(1, 20.0, (), (met((0, 1), 6.0),)),
    ]
    with pytest.raises(TimelineError, match=r"ranks \(0, 1\) have met 1 and 2 times"):
        breakdown_of_ranks(spent)


@pytest.mark.parametrize(
    ("sent_s", "asked_s", "had_s", "late_s"),
    [
        (1.0, 0.0, 5.0, 4.0),  # late is what is waited for after it was sent
        (1.0, 3.0, 5.0, 2.0),  # and not before anybody asked
        (4.0, 0.0, 4.5, 0.5),  # nor before it was sent: then the sender is late
        (1.0, 7.0, 7.0, 0.0),  # it lay there already
    ],
)
def test_message_is_late_from_when_it_is_sent_and_asked_for(sent_s, asked_s, had_s, late_s):
    sent = Sent(edge=3, receiver=0, micro_batch=5, begun_s=sent_s, ended_s=sent_s + 0.25)
    other = sent._replace(micro_batch=4, begun_s=0.0, ended_s=0.0)
    taken = Taken(edge=3, sender=1, micro_batch=5, asked_s=asked_s, had_s=had_s)
    spent = [
        Spent(2, 9.0, (), steps_sent=2, taken=(taken,)),
        Spent(2, 9.0, (), steps_sent=2, sent=(other, sent), free=0.5),
    ]
    assert breakdown_of_ranks(spent).links == (LinkUse(0, 1, late_s / 2, 0.25 / 2 / 2),)


def test_messages_that_cross_are_late_together_once():
    spent = [
        Spent(1, 9.0, (), sent=(Sent(0, 1, 0, 0.0, 0.0),), taken=(Taken(1, 1, 0, 1.0, 4.0),)),
        Spent(1, 9.0, (), sent=(Sent(1, 0, 0, 0.0, 0.0),), taken=(Taken(0, 0, 0, 2.0, 5.0),)),
    ]
    assert breakdown_of_ranks(spent).links == (LinkUse(0, 1, 4.0, 0.0),)


def test_what_a_rank_spent_comes_back_from_json():
    messages = (Sent(0, 1, 2, 3, 4),), (Taken(0, 1, 2, 3, 4),)
    spent = Spent(3, 4.0, (("F", 1.0),), (met((0, 1), 0.5),), 0.25, 2, *messages)
    assert typed(Spent, json.loads(json.dumps(asdict(spent)))) == spent


# --- of a timeline -----------------------------------------------------------------------------


@given(st.sampled_from(PIPELINES), st.integers(1, 4), st.integers(1, 6), *[st.integers(1, 9)] * 3)
def test_simulated_parts_sum_to_the_step_and_computes_are_their_spans(name, p, more, f, i, w):
    schedule = find(name)(2 * p if name == "interleaved" else p, p * more)
    cost = {"F": f, "I": i, "W": w, "B": i + w, "U": 1.0}
    timeline = simulate(lower(schedule), lambda action: cost[action.kind])
    found = breakdown_of(timeline)
    assert found is not None
    for rank in range(timeline.num_ranks):
        assert sum(found.seconds[rank]) == pytest.approx(step_s(timeline))
        own_s = (found.work_s[rank] + found.of("optimizer")[rank]) * found.num_steps
        assert own_s == pytest.approx(busy_s(timeline, rank))
    for kind in WORK:
        totals = [s * found.num_steps for s in found.of(kind)]
        assert totals == pytest.approx(kind_s(timeline, kind))


def test_collectives_count_where_nothing_runs_beside_them():
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 4.0),
        Span(0, "collective", "reduce", -1, 0, 3.0, 6.0),
        Span(0, "collective", "reduce", -1, 0, 5.0, 7.0),
        Span(0, "update", "U", 0, 0, 8.0, 9.0),
    ]
    found = breakdown_of(Timeline.of(1, spans))
    assert found is not None
    assert found.of("collectives") == (3.0,)
    assert found.of("waiting") == (1.0,)
    assert breakdown_of(Timeline.of(1, [])) is None


def test_gap_that_a_collective_ends_is_meeting_and_any_other_waiting():
    spans = [
        Span(0, "compute", "F", 0, 0, 1.0, 4.0),
        Span(0, "compute", "B", 0, 0, 6.0, 8.0),
        Span(0, "collective", "reduce", -1, 0, 11.0, 12.0),
        Span(0, "update", "U", 0, 0, 12.5, 13.0),
    ]
    found = breakdown_of(Timeline.of(1, spans))
    assert found is not None
    parts = "waiting", "meeting", "collectives", "optimizer"
    assert [found.of(part) for part in parts] == [(2.5,), (3.0,), (1.0,), (0.5,)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8))
def test_covered_time_is_counted_second_by_second(times):
    starts = np.array([a for a, _ in times], float)
    lengths = np.array([b for _, b in times], float)
    covered = {second for a, b in times for second in range(a, a + b)}
    assert covered_s(starts, starts + lengths) == len(covered)


# --- the table ---------------------------------------------------------------------------------


def test_table_has_a_column_for_each_rank_and_a_line_for_each_part_that_occurs():
    measured = broken({"F": 0.02, "waiting": 0.02, "once": 0.5}, {"F": 0.03, "once": 0.5}, steps=2)
    predicted = broken({"F": 0.01, "waiting": 0.001}, {"F": 0.011})
    assert parts_table(measured, predicted) == (
        "predicted / measured, ms             rank 0       rank 1\n"
        "forward                         10.0 / 10.0  11.0 / 15.0\n"
        "waiting for messages             1.0 / 10.0    0.0 / 0.0\n"
        "a step                          11.0 / 20.0  11.0 / 15.0\n"
        "once: warm-up, last checkpoint        500.0        500.0"
    )
    assert str(measured) == parts_table(measured)
    assert "/" not in str(measured)


def test_table_of_many_ranks_has_the_mean_and_the_most():
    measured = broken(*({"F": float(rank)} for rank in (1, 2, 9, 2, 1)))
    assert parts_table(measured) == (
        "measured, ms     mean              most\n"
        "forward       3,000.0  9,000.0 (rank 2)\n"
        "a step        3,000.0  9,000.0 (rank 2)"
    )


# --- the bottleneck ----------------------------------------------------------------------------


def split(name: str, stages: int, micro_batches: int, slow: dict[int, float], k: float):
    """Return the breakdown of a simulation in which stages of `slow` ranks take k times longer."""
    schedule = find(name)(stages, micro_batches)
    program = lower(schedule)
    factor = {s: f for rank, f in slow.items() for s in program.stages_of(rank)}
    cost = {"F": 2.0, "B": 4.0, "I": 2.0, "W": 2.0, "U": k}
    found = breakdown_of(simulate(program, lambda a: cost[a.kind] * factor.get(a.stage, 1.0)))
    assert found is not None
    return found


@given(
    st.sampled_from(PIPELINES), st.integers(2, 4), st.integers(1, 4), st.data(), st.floats(1.6, 9)
)
def test_slow_rank_of_any_pipeline_is_named(name, ranks, more, choose, factor):
    stages = 2 * ranks if name == "interleaved" else ranks
    rank = choose.draw(st.integers(0, ranks - 1))
    measured = split(name, stages, ranks * more, {rank: factor}, 1.0)
    predicted = split(name, stages, ranks * more, {}, 1.0)
    found = bottleneck(measured, predicted)
    if measured.step_s <= (1 + FLAG) * predicted.step_s:
        assert found.cause == "compute"
    else:
        assert (found.cause, found.ranks, found.is_named) == ("slow rank", (rank,), True)
        assert found.slowdown == pytest.approx(measured.step_s / predicted.step_s)


@given(st.sampled_from(PIPELINES), st.integers(1, 4), st.integers(1, 4), st.floats(1.3, 9))
def test_all_ranks_slower_is_no_single_rank(name, ranks, more, factor):
    stages = 2 * ranks if name == "interleaved" else ranks
    everyone = dict.fromkeys(range(ranks), factor)
    measured = split(name, stages, ranks * more, everyone, 1.0)
    found = bottleneck(measured, split(name, stages, ranks * more, {}, 1.0))
    assert (found.cause, found.ranks, found.is_named) == ("compute", (), True)


@given(st.sampled_from(PIPELINES), st.integers(1, 4), st.integers(1, 4), st.floats(0.8, 1.2))
def test_run_about_as_fast_as_predicted_has_nothing_to_mend(name, ranks, more, factor):
    stages = 2 * ranks if name == "interleaved" else ranks
    everyone = dict.fromkeys(range(ranks), factor)
    measured = split(name, stages, ranks * more, everyone, factor)
    found = bottleneck(measured, split(name, stages, ranks * more, {}, 1.0))
    assert (found.cause, found.is_named, found.hint) == ("compute", False, "")


@given(st.sampled_from(PIPELINES), st.integers(2, 4), st.data(), st.floats(2.0, 9))
def test_rank_with_more_work_by_plan_is_named_where_all_is_as_predicted(
    name, ranks, choose, factor
):
    stages = 2 * ranks if name == "interleaved" else ranks
    rank = choose.draw(st.integers(0, ranks - 1))
    planned = split(name, stages, 2 * ranks, {rank: factor}, 1.0)
    found = bottleneck(planned, planned)
    assert (found.cause, found.ranks, found.is_named) == ("imbalance", (rank,), True)


PLAN: dict[Part, float] = {"F": 1.0, "B": 2.0, "optimizer": 0.5, "waiting": 0.5}


def more(**parts: float) -> dict[Part, float]:
    return PLAN | {part: PLAN.get(part, 0.0) + value for part, value in parts.items()}  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("ranks", "links", "cause", "about"),
    [
        ((more(data=2.0), more(waiting=2.0)), (), "loader", (0,)),
        ((more(optimizer=2.0), more(meeting=2.0)), (), "optimizer", (0,)),
        ((more(collectives=2.0), more(collectives=2.0)), (), "collectives", ()),
        ((more(checkpoint=2.0), more(checkpoint=2.0)), (), "checkpoint", ()),
        ((more(waiting=2.0), more(waiting=2.0)), (LinkUse(0, 1, 2.0, 0.0),), "link", (0, 1)),
        ((more(messages=2.0), more(waiting=2.0)), (LinkUse(0, 1, 0.0, 2.0),), "link", (0, 1)),
        ((more(waiting=2.0), more(B=2.0)), (LinkUse(0, 1, 0.1, 0.1),), "slow rank", (1,)),
        ((more(rest=2.0), more(rest=2.0)), (), "unclear", ()),
        ((more(waiting=2.0), more(waiting=2.0)), (), "unclear", ()),
        # messages were under way as long as predicted: what else the ranks do cannot be a link
        ((more(data=2.0), more(data=2.0)), (LinkUse(0, 1, 3.0, 0.0),), "loader", (0,)),
    ],
)
def test_cause_that_costs_most_beyond_the_prediction_is_named(ranks, links, cause, about):
    found = bottleneck(broken(*ranks, links=links), broken(PLAN, PLAN))
    assert (found.cause, found.ranks, found.is_named) == (cause, about, True)
    assert found.hint
    assert "predicted" in found.evidence
    assert 0.0 <= found.share <= 1.0
    assert json.loads(json.dumps(found.to_json()))["ranks"] == list(about)


@pytest.mark.parametrize(
    ("steps_s", "said"),
    [
        ([4.0] * 15 + [8.0] * 15, "a quarter of the steps takes at most 4.00 s, 1.00 times: other"),
        ([5.3] * 10 + [6.35] * 20, "a quarter of the steps takes at most 5.30 s, 1.32 times"),
        ([6.0] * 30, ""),
        ([5.5] * 10 + [6.25] * 20, ""),  # the mean is 6 s: less than a tenth
        ([4.0] * 8 + [8.0] * 8, ""),  # too few to tell
        ([], ""),
    ],
)
def test_what_the_shorter_steps_take_is_told_where_they_are_unlike(steps_s, said):
    slow = broken(more(F=2.0), more(F=2.0))  # 6 s
    evidence = bottleneck(slow, broken(PLAN, PLAN), steps_s).evidence
    assert ("a quarter of the steps" in evidence) is bool(said)
    assert said in evidence
    assert "quarter of the steps" not in bottleneck(slow, None, steps_s).evidence


def test_flag_is_a_quarter_beyond_the_prediction_and_a_cause_a_tenth_of_the_step():
    plan, step_s = broken(PLAN, PLAN), 4.0
    for data_s, cause in ((FLAG * step_s, "compute"), (FLAG * step_s + 0.01, "loader")):
        assert bottleneck(broken(more(data=data_s), PLAN), plan).cause == cause
    slow = broken(more(data=0.5, rest=2.0), PLAN)  # 6.5 s
    found = bottleneck(slow, plan)
    assert found.cause == "unclear"
    assert "2.00 s of it pass between actions" in found.evidence
    waits = broken(more(waiting=2.0), more(waiting=2.0))
    assert "no single cause" in bottleneck(waits, plan).evidence
    assert bottleneck(broken(more(data=0.7, rest=2.0), PLAN), plan).cause == "loader"
    assert 0.5 / 6.5 < CAUSE < 0.7 / 6.7


def test_without_a_prediction_a_cause_is_named_by_its_share():
    assert bottleneck(broken({"F": 3.0, "data": 0.9})).cause == "compute"
    assert bottleneck(broken({"F": 3.0, "data": 0.9})).is_named is False
    found = bottleneck(broken({"F": 3.0, "data": 1.1}))
    assert (found.cause, found.ranks, found.slowdown) == ("loader", (0,), None)
    uneven = bottleneck(broken({"F": 3.0}, {"F": 1.0, "waiting": 2.0}))
    assert (uneven.cause, uneven.ranks) == ("slow rank", (0,))
    assert "prediction would tell" in uneven.hint


def test_prediction_for_other_ranks_is_refused():
    with pytest.raises(ValueError, match="2 ranks, predicted 1"):
        bottleneck(broken(PLAN, PLAN), broken(PLAN))


@given(breakdowns(), st.data())
def test_any_figures_give_a_verdict(measured, choose):
    rows = st.fixed_dictionaries(dict.fromkeys(PARTS, seconds))
    ranks = measured.num_ranks
    predicted = broken(*choose.draw(st.lists(rows, min_size=ranks, max_size=ranks)))
    for found in (bottleneck(measured), bottleneck(measured, predicted)):
        assert str(found).count("\n") == bool(found.hint)
        assert found.share >= 0.0
        json.dumps(found.to_json(), allow_nan=False)
    parts_table(measured, predicted)


@given(breakdowns(), st.floats(0.01, 100))
def test_verdict_does_not_depend_on_the_unit_of_time(measured, factor):
    other = replace(
        measured,
        wall_s=tuple(s * factor for s in measured.wall_s),
        seconds=tuple(tuple(s * factor for s in row) for row in measured.seconds),
        links=tuple(
            LinkUse(k.first, k.second, k.late_s * factor, k.handed_s * factor)
            for k in measured.links
        ),
    )
    one, two = bottleneck(measured), bottleneck(other)
    assert one.share == pytest.approx(two.share, rel=1e-6, abs=1e-9)
