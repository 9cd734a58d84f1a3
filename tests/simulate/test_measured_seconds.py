"""Replay: what was run is what is replayed; a change of the truth is what a what-if says."""

import doctest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.program.codes import COST_ROW, NUM_COSTS, OFFLOAD, RELOAD
from penstock.program.edges import TiedGroup
from penstock.program.lower import lower
from penstock.program.passes.offload import offload
from penstock.program.program import Program
from penstock.schedule import KINDS, SCHEDULES, gpipe
from penstock.schedule.orders import F, U
from penstock.simulate import Costs, simulate
from penstock.simulate.carry import carried
from penstock.simulate.measured_seconds import record
from penstock.simulate.what_if import Change, scaled
from penstock.timeline import Span, Timeline, step_s
from tests.program.lowering import lower_schedule
from tests.simulate.fake_run import Truth, drawn, fake_run, jittery, plain
from tests.simulate.strategies import edges_of, one_host

seeds = st.integers(0, 999)
times = st.floats(0.3, 4.0)


@st.composite
def runs(draw: st.DrawFn) -> Program:
    """Return a program that the runtime can run."""
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(SCHEDULES))(num_stages, num_micro_batches)
    tied = num_stages > 1 and not schedule.has_updates and draw(st.booleans())
    return lower_schedule(
        schedule,
        edges=edges_of(draw, num_stages),
        tied=[TiedGroup("w", (0, num_stages - 1), 4)] if tied else (),
        replicas=draw(st.integers(1, 2)),
        clip=not schedule.has_updates and draw(st.booleans()),
    )


def works(timeline: Timeline) -> dict[tuple[int, str], tuple[float, float]]:
    """Return start and end of every compute and update."""
    own = (span for span in timeline.spans if span.lane in ("compute", "update"))
    return {(span.rank, span.name): (span.start_s, span.end_s) for span in own}


def same_times(a: Timeline, b: Timeline) -> bool:
    ours, theirs = works(a), works(b)
    assert ours.keys() == theirs.keys()
    return np.allclose([ours[key] for key in ours], [theirs[key] for key in ours], atol=1e-9)


# -- replayed unchanged


@given(runs(), seeds)
def test_every_action_is_replayed_when_it_was_measured(program: Program, seed: int):
    measured = fake_run(program, jittery(seed))
    replayed = simulate(program, record(program, measured))
    assert same_times(measured, replayed)
    assert step_s(replayed) == pytest.approx(step_s(measured), rel=1e-12)


@given(runs(), seeds, st.floats(0.0, 2.0))
def test_run_that_is_shifted_in_time_is_replayed_the_same(
    program: Program, seed: int, later_s: float
):
    measured = fake_run(program, plain(seed))
    spans = [
        s._replace(start_s=s.start_s + later_s, end_s=s.end_s + later_s) for s in measured.spans
    ]
    shifted = Timeline.of(program.num_ranks, spans, meta=measured.meta)
    ours, theirs = (record(program, each) for each in (measured, shifted))
    assert np.allclose(ours.work_s, theirs.work_s)
    assert np.allclose(ours.start_s, theirs.start_s)


def test_rank_that_begins_late_is_replayed_late():
    program = lower_schedule(gpipe(1, 1), replicas=2)
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0),
        Span(0, "compute", "B", 0, 0, 1.0, 2.0),
        Span(0, "collective", "reduce", -1, 0, 2.0, 4.0),
        Span(0, "update", "U", 0, 0, 4.0, 4.5),
        Span(1, "compute", "F", 0, 0, 1.0, 2.0),
        Span(1, "compute", "B", 0, 0, 2.0, 3.5),
        Span(1, "collective", "reduce", -1, 0, 3.5, 4.0),
        Span(1, "update", "U", 0, 0, 4.0, 4.5),
    ]
    recorded = record(program, Timeline.of(2, spans, meta=(("clock", "measured"),)))
    assert recorded.start_s.tolist() == [0.0, 1.0]
    assert recorded.sum_s.tolist() == [0.5, 0.5]
    assert step_s(simulate(program, recorded)) == 4.5


def test_message_that_is_there_before_its_send_ends_is_under_way_from_its_start():
    program = lower(gpipe(2, 1))
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0),
        Span(0, "send", "F", 0, 0, 1.0, 4.0),
        Span(1, "compute", "F", 1, 0, 1.5, 2.5),
        Span(1, "compute", "B", 1, 0, 2.5, 3.5),
        Span(1, "send", "B", 1, 0, 3.5, 3.75),
        Span(1, "update", "U", 1, 0, 3.75, 4.0),
        Span(0, "compute", "B", 0, 0, 4.5, 5.5),
        Span(0, "update", "U", 0, 0, 5.5, 6.0),
    ]
    recorded = record(program, Timeline.of(2, spans, meta=(("clock", "measured"),)))
    assert recorded.message_s is not None
    assert recorded.message_s[0].tolist() == [3.0, 0.5, 0.0]
    assert recorded.message_s[1].tolist() == [0.25, 0.25, 0.5]  # it was there: the gap is reading
    assert step_s(simulate(program, recorded)) == 6.0


def test_copy_whose_lane_was_late_is_replayed_until_it_was_over():
    """A machine with too few cores begins a copy later than the thread asked for it."""
    program = offload(lower(gpipe(1, 4)), ["both"], beside=True)
    rows = np.zeros((NUM_COSTS, 1, 1))
    rows[: len(KINDS), 0, 0] = 1, 2, 0, 0, 4  # F B I W U
    for op, kind, seconds in ((OFFLOAD, F, 1.5), (OFFLOAD, U, 3), (RELOAD, F, 0.5), (RELOAD, U, 6)):
        rows[COST_ROW[op, kind]] = seconds
    truth = simulate(program, Costs(rows))
    late = [
        s._replace(start_s=s.start_s + 0.9 * (s.end_s - s.start_s)) if s.lane == "copy" else s
        for s in truth.spans
    ]
    measured = Timeline.of(1, late, meta=(("clock", "measured"),))
    replayed = simulate(program, record(program, measured))
    assert step_s(replayed) == step_s(truth)


# -- what if


@given(st.data(), runs(), seeds, times)
def test_faster_work_is_the_run_with_faster_work(
    data: st.DataObject, program: Program, seed: int, faster: float
):
    truth = plain(seed)
    which = data.draw(st.sampled_from(["rank", "stage", "kind"]))
    limit = {"rank": program.num_ranks, "stage": program.num_stages, "kind": len(KINDS)}[which]
    at = data.draw(st.integers(0, limit - 1))

    def work(rank: int, kind: str, stage: int, number: int) -> float:
        own = {"rank": rank, "stage": stage, "kind": KINDS.index(kind)}[which]
        return truth.work(rank, kind, stage, number) / (faster if own == at else 1.0)

    pairs = {"kinds": ((KINDS[at], faster),)} if which == "kind" else {f"{which}s": ((at, faster),)}
    change = Change(**pairs)
    recorded = scaled(program, record(program, fake_run(program, truth)), change)
    assert same_times(simulate(program, recorded), fake_run(program, truth._replace(work=work)))


@given(runs(), seeds, st.just(float("inf")) | times, st.just(0.0) | st.floats(0.01, 1.0))
def test_other_links_are_the_run_with_other_links(
    program: Program, seed: int, faster: float, later_s: float
):
    truth = plain(seed)
    alone = {reduce.bucket for reduce in program.code.reductions if len(reduce.ranks) < 2}

    def sums(rank: int, bucket: str, step: int) -> float:
        return truth.sums(rank, bucket, step) / (1.0 if bucket in alone else faster)

    changed = truth._replace(
        sums=sums, message=lambda *key: (0.25 / faster, 0.25 / faster + later_s, 0.0)
    )
    change = Change(links=faster, latency_s=later_s)
    recorded = scaled(program, record(program, fake_run(program, truth)), change)
    assert same_times(simulate(program, recorded), fake_run(program, changed))


@given(runs(), seeds, st.floats(0.0, 1.0), st.floats(0.5, 9.0))
def test_links_of_a_cluster_are_those_of_the_simulation_with_it(
    program: Program, seed: int, latency_s: float, bytes_per_s: float
):
    action_s = np.random.default_rng(seed).random((len(KINDS), program.num_stages, 1))
    truth = plain(seed)._replace(work=lambda _, k, s, m: float(action_s[KINDS.index(k), s, 0]))
    truth = truth._replace(sums=lambda *key: 0.0)
    cluster = one_host(program.num_ranks, Link(latency_s, bytes_per_s, 0.125))
    recorded = scaled(program, record(program, fake_run(program, truth)), Change(cluster=cluster))
    expected = simulate(program, Costs(action_s), cluster)
    assert same_times(simulate(program, recorded, cluster), expected)


def split_truth(seed: int, costs: Costs, *, alike: bool = False) -> Truth:
    """Return seconds in which I and W are the parts of B that `costs` says."""

    def work(_: int, kind: str, stage: int, number: int) -> float:
        of, number = kind if kind in "FU" else "B", 0 if alike else number
        own = float(costs.action_s[KINDS.index(kind), stage, 0])
        whole = float(costs.action_s[KINDS.index(of), stage, 0])
        return drawn(seed, of, stage, number) * own / whole

    return plain(seed)._replace(work=work, sums=lambda _, bucket, step: drawn(seed, bucket))


def buckets(program: Program) -> set[tuple[str, str]]:
    return {(one.word, one.bucket) for one in program.code.reductions}


def sends_over(program: Program) -> set[int]:
    """Return the edges over which some message goes."""
    return set(program.code.edge[program.code.op == 1].tolist())


TRAINING = [
    make for make in SCHEDULES if make.__name__ != "forward_only" and not make(2, 2).has_updates
]
kinds_s = st.floats(0.1, 2.0)


@given(
    st.sampled_from(TRAINING), st.sampled_from(TRAINING), st.integers(1, 4), st.integers(1, 5),
    st.integers(1, 2), seeds, st.tuples(kinds_s, kinds_s, kinds_s),
)  # fmt: skip
def test_another_schedule_is_the_run_of_that_schedule(  # noqa: PLR0913 - what is drawn
    one, two, stages, m, replicas, seed, parts
):
    program, other = (
        lower_schedule(make(stages, m), replicas=replicas, clip=True) for make in (one, two)
    )
    assume(buckets(other) <= buckets(program) and sends_over(other) <= sends_over(program))
    action_s = np.ones((len(KINDS), stages, 1))
    action_s[1:4] = np.array(parts)[:, None, None]
    costs = Costs(action_s)
    truth = split_truth(seed, costs)
    recorded = record(program, fake_run(program, truth))
    found = carried(program, recorded, other, costs=costs)
    assert same_times(simulate(other, found.recorded), fake_run(other, truth))
    assert bool(found.rests_on) == (
        {k for k in "IW" if k in str(other)} != {k for k in "IW" if k in str(program)}
        or ("B0" in str(other)) != ("B0" in str(program))
    )


@given(st.sampled_from(TRAINING), st.integers(1, 4), st.integers(1, 5), st.integers(1, 9), seeds)
def test_more_micro_batches_are_the_run_with_more(make, stages, m, other_m, seed):
    costs = Costs(np.ones((len(KINDS), stages, 1)))
    truth = split_truth(seed, costs, alike=True)
    program, other = lower(make(stages, m)), lower(make(stages, other_m))
    assume(buckets(other) <= buckets(program) and sends_over(other) <= sends_over(program))
    recorded = record(program, fake_run(program, truth))
    found = carried(program, recorded, other, costs=costs)
    assert same_times(simulate(other, found.recorded), fake_run(other, truth))
    means = any("mean of a stage" in note for note in found.rests_on)
    assert means == (other_m > m)


@given(runs(), seeds)
def test_what_is_carried_to_the_same_program_is_what_was_recorded(program: Program, seed: int):
    recorded = record(program, fake_run(program, jittery(seed)))
    found = carried(program, recorded, program)
    assert found.rests_on == ()
    for name in ("sum_s", "message_s"):
        assert np.allclose(getattr(found.recorded, name), getattr(recorded, name))
    if all(len(program.stages_of(rank)) for rank in range(program.num_ranks)):
        computes = program.code.op[np.isin(program.code.op, (0, 4))] == 0
        assert np.allclose(found.recorded.work_s[computes], recorded.work_s[computes])


def test_examples_of_the_page_are_what_runs():
    page = Path(__file__).parents[2] / "docs" / "replay.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 10
    assert result.failed == 0
