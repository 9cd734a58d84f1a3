"""Critical path: its pieces make the step, each is needed by the next, and a longer one shows."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.errors import TimelineError
from penstock.program.lower import chain, lower
from penstock.program.program import Program, Reshard, Unshard
from penstock.schedule import KINDS, Action, gpipe, one_f_one_b
from penstock.simulate import Costs, Path, critical_path, record, simulate
from penstock.timeline import Span, Timeline, step_s
from tests.program.lowering import lower_schedule
from tests.simulate.fake_run import Truth, fake_run, jittery, plain
from tests.simulate.strategies import clusters, links, one_host, programs, random_seconds
from tests.simulate.test_measured_seconds import runs, seeds


def assert_makes_the_step(path: Path, timeline: Timeline) -> None:
    assert path.step_s == step_s(timeline)
    assert sum(path.seconds().values()) == pytest.approx(step_s(timeline), rel=1e-12)
    assert path.hops[0].start_s == 0.0
    assert all((a.end_s, a.peer) == (b.start_s, b.rank) for a, b in pairwise(path.hops))
    assert all(hop.end_s > hop.start_s or hop.rank != hop.peer for hop in path.hops)


@given(st.data(), programs(), seeds)
def test_pieces_make_the_step_of_any_simulation(data: st.DataObject, program: Program, seed: int):
    cluster = data.draw(st.none() | clusters(program.num_ranks))
    timeline = simulate(program, random_seconds(seed), cluster)
    path = critical_path(program, timeline)
    assert_makes_the_step(path, timeline)


@given(st.data(), programs(), links, seeds)
def test_longer_compute_of_the_path_makes_the_step_longer(
    data: st.DataObject, program: Program, link: Link, seed: int
):
    """So it is critical: what is not delays nothing when it takes a moment longer."""
    cluster = one_host(program.num_ranks, replace(link, slowdown=0.0))
    seconds = random_seconds(seed)
    before = simulate(program, seconds, cluster)
    path = critical_path(program, before)
    assert path.seconds()["idle"] == pytest.approx(0.0, abs=1e-9)
    computes = [hop for hop in path.hops if hop.reason == "compute"]
    hop = data.draw(st.sampled_from(computes))
    longer = Action(hop.kind, hop.stage, hop.micro_batch)
    after = simulate(program, lambda action: seconds(action) + 0.125 * (action == longer), cluster)
    assert step_s(after) >= step_s(before) + 0.125 - 1e-9


@given(runs(), seeds)
def test_pieces_make_the_step_of_any_run(program: Program, seed: int):
    measured = fake_run(program, jittery(seed))
    path = critical_path(program, measured)
    assert_makes_the_step(path, measured)


@given(st.data(), runs(), seeds)
def test_longer_piece_of_the_path_makes_the_run_longer(
    data: st.DataObject, program: Program, seed: int
):
    truth = plain(seed)
    measured = fake_run(program, truth)
    path = critical_path(program, measured)
    assert path.seconds()["idle"] == pytest.approx(0.0, abs=1e-9)
    hop = data.draw(st.sampled_from([h for h in path.hops if h.reason in ("compute", "update")]))
    longer = hop.rank, hop.kind, hop.stage, hop.micro_batch

    def work(*key: object) -> float:
        return truth.work(*key) + 0.125 * (key == longer)

    after = fake_run(program, truth._replace(work=work))
    assert step_s(after) >= step_s(measured) + 0.125 - 1e-9


@given(runs(), seeds)
def test_replayed_run_has_the_path_of_the_run(program: Program, seed: int):
    measured = fake_run(program, plain(seed))
    replayed = simulate(program, record(program, measured))
    ours, theirs = (critical_path(program, each).seconds() for each in (measured, replayed))
    assert ours["compute"] == pytest.approx(theirs["compute"])
    assert ours["update"] == pytest.approx(theirs["update"])
    assert ours["collective"] == pytest.approx(theirs["collective"])


def one(action: Action) -> float:
    return 1.0


def test_path_of_a_small_pipeline_is_the_one_found_by_hand():
    program = lower_schedule(one_f_one_b(2, 1), edges=chain(2, size_bytes=2))
    timeline = simulate(program, one, one_host(2, Link(0.5, 4.0, 0.25)))
    found = [(h.reason, h.rank, h.peer, h.end_s) for h in critical_path(program, timeline).hops]
    assert found == [
        ("compute", 0, 0, 1.0),
        ("message", 0, 1, 2.5),  # 0.25 at each end, 0.5 on the wire, 0.5 under way
        ("compute", 1, 1, 3.5),
        ("compute", 1, 1, 4.5),
        ("message", 1, 0, 6.0),
        ("compute", 0, 0, 7.0),
    ]


def test_collective_is_blamed_on_the_member_that_came_last():
    program = lower_schedule(gpipe(1, 1), replicas=2)
    truth = Truth(lambda rank, *rest: 1.0 + rank, lambda *key: (0.0, 0.0, 0.0), lambda *key: 0.5)
    hops = critical_path(program, fake_run(program, truth)).hops
    assert [(h.reason, h.rank, h.end_s) for h in hops] == [
        ("compute", 1, 2.0),
        ("compute", 1, 4.0),
        ("collective", 1, 4.5),
        ("update", 1, 6.5),
    ]


def test_compute_that_waits_for_its_weights_longer_than_for_its_message_is_behind_them():
    program = lower(gpipe(2, 1))
    first, second = program.code
    gathered = replace(program, code=(first, (Unshard(1), *second[:3], Reshard(1), *second[3:])))
    costs = Costs(np.ones((len(KINDS), 2, 1)), unshard_s=np.array([0.0, 5.0]))
    timeline = simulate(gathered, costs, one_host(2, Link(0.5, 1.0)))
    hops = critical_path(gathered, timeline).hops
    assert [(h.reason, h.kind, h.rank, h.end_s) for h in hops[:2]] == [
        ("collective", "unshard", 1, 5.0),
        ("compute", "F", 1, 6.0),
    ]


def test_gap_that_nothing_explains_is_idle():
    program = lower(gpipe(1, 1))
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0),
        Span(0, "compute", "B", 0, 0, 1.5, 2.5),
        Span(0, "update", "U", 0, 0, 2.5, 3.0),
    ]
    path = critical_path(program, Timeline.of(1, spans, meta=(("clock", "measured"),)))
    assert path.seconds() == {
        "compute": 2.0, "update": 0.5, "copy": 0.0, "message": 0.0, "collective": 0.0, "idle": 0.5,
    }  # fmt: skip
    assert [hop.reason for hop in path.hops] == ["compute", "idle", "compute", "update"]


def test_gap_before_a_message_that_was_there_is_copying_it():
    program = lower(gpipe(2, 1))
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0),
        Span(0, "send", "F", 0, 0, 1.0, 1.25),
        Span(1, "compute", "F", 1, 0, 2.0, 3.0),
        Span(1, "compute", "B", 1, 0, 3.0, 4.0),
        Span(1, "send", "B", 1, 0, 4.0, 4.25),
        Span(0, "compute", "B", 0, 0, 4.5, 5.5),
        Span(0, "update", "U", 0, 0, 5.5, 6.5),
        Span(1, "update", "U", 1, 0, 4.25, 5.0),
    ]
    path = critical_path(program, Timeline.of(2, spans, meta=(("clock", "measured"),)))
    found = [(h.reason, h.rank, h.peer, h.end_s) for h in path.hops]
    assert found == [
        ("compute", 0, 0, 1.0), ("message", 0, 1, 2.0), ("compute", 1, 1, 3.0),
        ("compute", 1, 1, 4.0), ("message", 1, 0, 4.5), ("compute", 0, 0, 5.5),
        ("update", 0, 0, 6.5),
    ]  # fmt: skip


def test_timeline_of_another_program_is_refused():
    two, three = lower(gpipe(2, 2)), lower(gpipe(2, 3))
    timeline = simulate(two, one)
    with pytest.raises(TimelineError, match=r"rank 0 of the timeline lacks F0\.2"):
        critical_path(three, timeline)
    with pytest.raises(TimelineError, match=r"the timeline shows F0\.2 on rank 0"):
        critical_path(two, simulate(three, one))
    with pytest.raises(TimelineError, match="a timeline of 3 ranks for a program of 2"):
        critical_path(two, simulate(lower(gpipe(3, 2)), one))
