"""Guard: what it keeps, and what that costs, are as planned; the way that costs least is taken."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.cluster import Host
from penstock.errors import PlanError, ProgramError
from penstock.graph.whole_optimizer import WholeOptimizer
from penstock.members.guard import Guardian, _divided
from penstock.pilot import redundancy
from penstock.pilot.losses import PlanBasis, committing
from penstock.plan import Guarding, Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile.kinds import places_of
from penstock.program.program import Program
from penstock.program.reductions import Reduction
from penstock.simulate.guards import guard_costs
from penstock.transport.threads import ThreadTransport
from tests.members import runs
from tests.members.test_kills import check


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


@pytest.mark.parametrize("every", [0, 1, 3])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.sampled(2)
def test_a_guard_holds_and_gets_what_was_predicted(
    every: int, shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no memory is shared; what is in a record besides are numbers, and words."""
    ways, guard = runs.ways_of("gpt", "adamw", 3), Guarding(every, 2)
    plan = runs.plan_for(ways, 3, 1, guard=guard)
    held, sent = dict[int, int](), dict[int, int]()
    counts = Guardian.counts

    def counted(one: Guardian, done: int) -> None:
        kept = one._copy
        assert kept is not None
        if (last := kept.record(done - 1)) is not None and done:
            held[one.rank.rank] = one.size_bytes()
            sent[one.rank.rank] = last.head.size
        counts(one, done)

    if not shares:
        monkeypatch.setattr(ThreadTransport, "bind_memory", lambda *about: None)
    monkeypatch.setattr(Guardian, "counts", counted)
    told = runs.run(ways, {3: plan}, 3, tmp_path)
    check(told, "gpt", killed=0)
    (way,), graph = ways.ways, ways.ways[0].captured.graph
    program, stages = lower_plan(plan, graph), stages_of(plan, graph)
    where = places_of(way.profiles, ways.cluster, 3), (graph, stages)
    for rank, row in enumerate(guard_costs(program, way.profiles, where, guard)):
        largest = max(graph.kept_bytes(p) for stage in stages.stages for p in stage.parameters)
        beside = 200 * len(graph.gradients) + 6 * largest  # groups are of whole parameters
        assert 0 <= sent[rank] - row.sent_bytes + beside / 2 <= beside
        assert abs(held[rank] - row.kept_bytes) <= (every + 1) * beside


def test_ranks_with_few_and_with_many_parameters_begin_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no memory is shared each waits for as many records as the others send."""
    ways, groups = runs.ways_of("gpt", "adamw", 3), dict[int, int]()
    begin = Guardian.begin

    def noted(one: Guardian, step: int) -> int:
        groups[one.rank.rank] = len(one._giver.groups)
        return begin(one, step)

    monkeypatch.setattr(Guardian, "begin", noted)
    monkeypatch.setattr(ThreadTransport, "bind_memory", lambda *about: None)
    plan = runs.plan_for(ways, 3, 1, guard=Guarding(99, 1))
    check(runs.run(ways, {3: plan}, 3, tmp_path), "gpt", killed=0)
    assert len({*groups.values()}) > 1


@pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=["guards", "replicas"])
def test_channels_are_opened_by_all_together_before_anything_is_sent(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices that queue, whoever first uses one waits for the rank at its other end."""
    ways, did = runs.ways_of("gpt", "adamw", 3), dict[int, list[str]]()
    bind, barrier = ThreadTransport.bind_send, ThreadTransport.barrier

    def noted_bind(end: ThreadTransport, *about: Any, **more: Any) -> Any:
        send = bind(end, *about, **more)
        return lambda tensors: (did.setdefault(end.rank, []).append("sends"), send(tensors))[1]

    def noted_barrier(end: ThreadTransport) -> None:
        did.setdefault(end.rank, []).append("opens")
        barrier(end)

    monkeypatch.setattr(ThreadTransport, "bind_send", noted_bind)
    monkeypatch.setattr(ThreadTransport, "barrier", noted_barrier)
    monkeypatch.setattr(ThreadTransport, "bind_memory", lambda *about: None)
    monkeypatch.setattr(ThreadTransport, "is_queued", property(lambda end: True))
    check(runs.run(ways, {3: runs.plan_for(ways, *shape)}, 3, tmp_path), "gpt", killed=0)
    assert [row[0] for row in did.values()] == ["opens"] * 3


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_groups_have_every_name_once_and_are_of_about_one_size(sizes, count) -> None:
    groups = _divided(sizes, count)
    assert sorted(name for group in groups for name in group) == sorted(sizes)
    totals = sorted(sum(sizes[name] for name in group) for group in groups)
    assert all(groups)
    assert totals[-1] - totals[0] <= max(sizes.values())


def pipeline(ways: PlanBasis, **options) -> Plan:
    return runs.plan_for(ways, 3, 1, **options)


def test_the_way_that_costs_a_step_least_is_taken_if_it_fits(monkeypatch) -> None:
    monkeypatch.setattr(redundancy, "_WORTH", 0.0)
    ways = runs.ways_of("gpt", "adamw", 3)
    plan = pipeline(ways)
    (way,), bare = ways.ways, plan.changed(guard=None)
    found = list(redundancy._ways(bare, lower_plan(bare, way.captured.graph), way, ways.cluster))
    assert [one.guard.every for one in found] == [0, 1, 2, 4, 8, 16]
    assert plan.agreement.guard == min(found, key=lambda one: one.seconds).guard
    assert all(a.seconds > b.seconds for a, b in pairwise(found[1:]))  # a longer log sends less
    least = min(found, key=lambda one: one.kept_bytes)
    peaks = committing(bare, ways).predicted.peak_bytes
    device = replace(ways.cluster.devices[0], memory_bytes=max(peaks) - found[-1].kept_bytes)
    small = replace(ways, cluster=replace(ways.cluster, devices=(device,)))
    tight = committing(bare, small)
    assert tight.agreement.guard in (None, *(one.guard for one in found if one is not found[-1]))
    none = replace(device, memory_bytes=max(redundancy_free(ways, bare)) + least.kept_bytes - 1)
    assert committing(
        bare, replace(ways, cluster=replace(ways.cluster, devices=(none,)))
    ).agreement.guard in (
        None,
        least.guard,
    )


def redundancy_free(ways: PlanBasis, plan: Plan) -> tuple[int, ...]:
    way = ways.ways[0]
    made = redundancy.predicted(plan, way.captured.graph, way.profiles, ways.cluster)
    assert made.predicted is not None
    return made.predicted.peak_bytes


def test_copies_count_in_the_peak_and_the_step(monkeypatch) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    plan = pipeline(ways)
    assert plan.agreement.guard is not None
    assert plan.predicted is not None
    (way,), bare = ways.ways, plan.changed(guard=None)
    found = list(redundancy._ways(bare, lower_plan(bare, way.captured.graph), way, ways.cluster))
    (own,) = [one for one in found if one.guard == plan.agreement.guard]
    without = redundancy_free(ways, bare)
    rows = zip(plan.predicted.peak_bytes, without, own.rows, strict=True)
    assert [more - less for more, less, _ in rows] == [row.kept_bytes for row in own.rows]
    bare_s = redundancy.predicted(bare, way.captured.graph, way.profiles, ways.cluster)
    assert bare_s.predicted is not None
    assert plan.predicted.step_s == pytest.approx(bare_s.predicted.step_s + own.seconds)


def test_only_optimizers_that_are_known_by_element_may_have_parts_renewed() -> None:
    class Odd(torch.optim.SGD):
        """Counts its steps."""

    ways = runs.ways_of("gpt", "adamw", 3)
    way = ways.ways[0]
    model = nn.Linear(2, 2)
    assert WholeOptimizer(torch.optim.AdamW(model.parameters()), model).is_plain
    assert not WholeOptimizer(Odd(model.parameters(), 0.1), model).is_plain
    redundancy._plain[way.captured.model] = False
    try:
        assert pipeline(ways).agreement.guard == Guarding(0, 1)
    finally:
        del redundancy._plain[way.captured.model]


def test_guards_are_on_another_host_where_there_is_one() -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    hosts = tuple(Host(name, ways.cluster.devices[0].name, 2) for name in "ab")
    apart = replace(ways.cluster, hosts=hosts, between=ways.cluster.inside)
    plan = runs.plan_for(replace(ways, cluster=apart), 4, 1)
    assert plan.agreement.guard is not None
    assert plan.agreement.guard.apart == 2
    told = next(each for each in plan.decisions if each.what == "redundancy")
    assert "any host" in told.why
    grid = runs.plan_for(replace(ways, cluster=apart), 1, 4)
    assert grid.agreement.guard is None
    assert "any host" in next(d for d in grid.decisions if d.what == "redundancy").why
    assert redundancy._furthest(4, ways.cluster) == 1


def test_whether_a_host_may_be_lost_is_found_by_looking_at_every_stage() -> None:
    ways = runs.ways_of("gpt", "adamw", 4)
    plan = runs.plan_for(ways, 2, 2)  # replica 0 on ranks 0 and 1
    program = lower_plan(plan, ways.ways[0].captured.graph)
    assert redundancy._survives(program, "aabb", "a", None)
    assert not redundancy._survives(program, "abab", "a", None)
    line = lower_plan(runs.plan_for(ways, 4, 1), ways.ways[0].captured.graph)
    assert not redundancy._survives(line, "aabb", "a", None)
    assert not redundancy._survives(line, "aabb", "a", Guarding(1, 1))
    assert redundancy._survives(line, "aabb", "a", Guarding(1, 2))


def test_a_program_gives_to_guards_before_the_word_and_can_be_saved(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    graph = ways.ways[0].captured.graph
    program = lower_plan(pipeline(ways, guard=Guarding(2)), graph)
    for code in program.code:
        hows = [each.word for each in code if isinstance(each, Reduction)]
        assert hows[-2:] == ["guard", "commit"]
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json").end.guard == Guarding(2)
    with pytest.raises(ProgramError):
        replace(program, end=replace(program.end, guard=None))


@pytest.mark.parametrize("guard", [Guarding(-1), Guarding(1, 0), Guarding(1, 3)])
def test_a_plan_says_of_a_guard_that_cannot_be(guard: Guarding) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    with pytest.raises(PlanError, match="guard is"):
        pipeline(ways).changed(guard=guard)
    with pytest.raises(PlanError, match="all ranks agree"):
        pipeline(ways).changed(commits=False, guard=Guarding(1))


@pytest.mark.parametrize("every", [1, 3])
def test_a_record_has_what_the_optimizer_keeps_now(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it keeps something else than before: as one that makes its state anew does."""
    ways = runs.ways_of("gpt", "adamw", 3)
    plan, exchange = runs.plan_for(ways, 3, 1, guard=Guarding(every, 1)), Guardian.exchange
    looked = set[int]()

    def renewed(one: Guardian, reduce: Reduction) -> None:
        step, (weights,) = one.rank.progress.first_step + reduce.step, one.rank.weights.values()
        assert weights.optimizer is not None
        state = weights.optimizer.state
        for parameter, held in state.items() if step % 2 else ():
            state[parameter] = {key: value.clone() for key, value in held.items()}
        record, giver = one._slot(step), one._giver
        assert step or not giver._turns, "what it began with is held by nobody"
        exchange(one, reduce)
        names = giver.groups[step % len(giver.groups)]
        tensors, _ = giver._state(names)
        _, *views = record.views(giver._turn(step % len(giver.groups), gradients=True).layout)
        kept = views[len(views) - len(tensors) :]
        assert kept
        assert all(torch.equal(a, b) for a, b in zip(kept, tensors.values(), strict=True))
        looked.add(step)

    monkeypatch.setattr(Guardian, "exchange", renewed)
    check(runs.run(ways, {3: plan}, 3, tmp_path), "gpt", killed=0)
    assert looked == {*range(ways.ways[0].job.num_steps)}
