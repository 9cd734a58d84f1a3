"""Moves: found together, what each stage can do without is near the best of all that there is."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.errors import PlanError
from penstock.plan import Plan, plan_by_hand
from penstock.search import Fixed, search
from penstock.search.field import Effort, Field
from penstock.search.judge import Judge
from penstock.search.moves import Climber, MayMove, StageMove
from tests.search.chains import chain, cluster_of, profile_of, with_costs

GRAPH = chain([400, 300, 500], [60, 40, 20])
PROFILE = with_costs(
    profile_of(GRAPH, [0.02, 0.01, 0.03]),
    far_s_per_byte=2e-5,
    state_bytes_per_byte=2.0,
    update_s_per_byte=4e-5,
)
FREE = MayMove(again=True, far=True, state=True, shards=True, beside=True, cuts=True)
WORDS = ("none", "state", "all"), ("replicate", "shard_keep", "shard")


@cache
def machine(cap: int, bytes_per_s: float) -> Cluster:
    there = cluster_of(2, link=Link(0.0, bytes_per_s))
    kinds = tuple(replace(kind, memory_bytes=cap) for kind in there.devices)
    return replace(there, devices=kinds)


def planned(cap: int, bytes_per_s: float) -> Plan:
    asked = Fixed(ranks=2, replicas=2)
    there = machine(cap, bytes_per_s)
    return search(GRAPH, PROFILE, there, micro_batches=4, fixed=asked).plan


def brute(cap: int, bytes_per_s: float) -> float:
    """Return the least seconds of all plans of two replicas, each stage a layer, that fit."""
    judge, least = Judge(GRAPH, PROFILE, machine(cap, bytes_per_s)), float("inf")
    bare = plan_by_hand(
        GRAPH, [0, 1], "breadth_first", num_micro_batches=2, num_ranks=1, replicas=2
    )
    rows = itertools.product(itertools.product(*WORDS), repeat=3)
    for row, ahead in itertools.product(rows, (0, 1)):
        far, parts = zip(*row, strict=True)
        away = {"offload": far} if any(word != "none" for word in far) else {}
        divided = {"shard": parts} if any(word != "replicate" for word in parts) else {}
        try:
            plan = bare.changed(**away, **divided, prefetch=ahead)
        except PlanError:  # weights of each replica in far memory, or nothing to fetch
            continue
        made = judge.candidate(plan)
        least = least if made.refused else min(least, made.step_s)
    return least


@pytest.mark.parametrize("bytes_per_s", [2e4, 1e6])
@pytest.mark.sampled(2)
def test_more_memory_is_never_slower_and_nothing_that_was_tried_one_by_one_is_faster(
    bytes_per_s: float,
) -> None:
    whole = max(planned(10**9, bytes_per_s).predicted.peak_bytes)
    steps: list[float] = []
    for part in (0.45, 0.6, 1.0):
        plan = planned(int(part * whole), bytes_per_s)
        assert max(plan.predicted.peak_bytes) <= int(part * whole)
        steps.append(plan.predicted.step_s)
    assert steps == sorted(steps, reverse=True)
    cap = int(0.6 * whole)
    assert planned(cap, bytes_per_s).predicted.step_s <= 1.02 * brute(cap, bytes_per_s)


@given(st.data())
@settings(max_examples=60)
def test_a_move_changes_what_it_says_and_what_has_to_go_with_it(data) -> None:
    replicas = data.draw(st.integers(1, 2))
    plan = plan_by_hand(
        GRAPH, [0, 1], "breadth_first", num_micro_batches=4, num_ranks=1, replicas=replicas
    )
    fetched = {"shard": ("shard",) * 3} if replicas > 1 else {"offload": ("all",) * 3}
    moves = st.sampled_from(list(FREE.moves(plan.changed(**fetched))))
    for move in data.draw(st.lists(moves, max_size=12)):
        made = move.apply(plan, GRAPH)
        if made is None:
            continue
        match move.what:
            case "again":
                assert made.recompute[move.stage] == move.value
            case "far":
                assert made.stages[move.stage].far == move.value
            case "shard":
                assert made.stages[move.stage].weights == move.value
            case "ahead":
                assert made.ahead[move.stage] == move.value
            case "units":
                assert len({*made.cuts} ^ {*plan.cuts}) == 1
        if replicas > 1:
            assert all(made.shard[stage] != "replicate" for stage in made.far)
        assert (made.cuts == plan.cuts) == (move.what != "units")
        assert made.agreement.clip == plan.agreement.clip
        plan = made


def test_moves_that_a_plan_cannot_have_are_none() -> None:
    plan = plan_by_hand(GRAPH, [0, 1], "breadth_first", num_micro_batches=4, num_ranks=1)
    assert StageMove("shard", 0, "shard").apply(plan, GRAPH) is None  # of one replica
    assert StageMove("prefetch", -1, 1).apply(plan, GRAPH) is None  # of nothing
    assert StageMove("beside", -1, True).apply(plan, GRAPH) is None
    assert StageMove("again", 0, False).apply(plan, GRAPH) is None  # as it is


def test_room_is_made_where_a_byte_costs_least() -> None:
    graph = chain([10] * 6, [500, 10] * 3)  # the first result of a stage is what it can repeat
    profile = profile_of(graph, [0.05, 0.05, 0.01, 0.01, 0.03, 0.03])
    plan = plan_by_hand(graph, [1, 3], "breadth_first", num_micro_batches=4, num_ranks=1)
    peak = max(Judge(graph, profile, cluster_of(1)).candidate(plan).peak_bytes)
    judge = Judge(graph, profile, cluster_of(1, memory_bytes=peak - 600))
    only = MayMove(again=True, far=False, state=False, shards=False, beside=False, cuts=False)
    climber = Climber(Field(judge, [plan], "time", Effort()), only)
    made = climber.lowered(judge.candidate(plan), beside=False)
    assert not made.refused
    ways = itertools.product((False, True), repeat=3)
    tried = [judge.candidate(plan.changed(recompute=way)) for way in ways]
    assert made.step_s == min(each.step_s for each in tried if not each.refused)
