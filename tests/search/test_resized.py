"""Resized: stages cut in two and made one, and a search that finds how few gathers are best."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.program.program import Unshard
from penstock.search import Fixed, search
from penstock.search.judge import Judge
from penstock.search.resized import as_one, in_two
from tests.search.chains import chain, cluster_of, profile_of, with_costs

GRAPH = chain([400, 300, 500, 100], [60, 40, 20, 30])
PROFILE = with_costs(profile_of(GRAPH, [0.02, 0.01, 0.03, 0.02]), state_bytes_per_byte=2.0)
WORDS = ("replicate", "shard_keep", "shard")


def replicas(cuts, schedule="breadth_first", ranks=1):
    return plan_by_hand(GRAPH, cuts, schedule, num_micro_batches=2, num_ranks=ranks, replicas=2)


@given(st.data())
@settings(max_examples=60)
def test_a_stage_in_two_made_one_again_is_the_stage(data) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, 2), max_size=2)))
    plan = replicas(cuts)
    each = st.tuples(st.sampled_from(WORDS), st.integers(0, 2), st.booleans())
    rows = data.draw(st.lists(each, min_size=len(cuts) + 1, max_size=len(cuts) + 1))
    words, ahead, again = zip(*rows, strict=True)
    fetched = any(word != "replicate" for word in words)
    plan = plan.changed(shard=words, prefetch=ahead if fetched else 0, recompute=again)
    stage = data.draw(st.integers(0, len(cuts)))
    ends = (-1, *cuts, 3)
    two = in_two(plan, GRAPH, stage)
    if ends[stage + 1] - ends[stage] == 1:  # one layer
        assert two is None
        return
    assert len({*two.cuts} - {*cuts}) == 1
    assert two.stages[stage].weights == two.stages[stage + 1].weights == words[stage]
    assert two.ahead[stage : stage + 2] == (plan.ahead[stage],) * 2
    assert as_one(two, GRAPH, stage) == plan


def test_a_stage_is_cut_where_its_weights_are_halved() -> None:
    assert in_two(replicas([]), GRAPH, 0).cuts == (1,)  # 400 + 300, 500 + 100
    assert in_two(replicas([1]), GRAPH, 1).cuts == (1, 2)


def test_units_of_a_rank_become_one_and_stages_of_two_ranks_do_not() -> None:
    plan = replicas([1], "one_f_one_b", 2)
    assert as_one(plan, GRAPH, 0) is None
    assert as_one(plan, GRAPH, 1) is None  # the last one
    assert in_two(plan, GRAPH, 0) is None  # micro-batches would cross both parts in turn
    units = plan.refined(GRAPH)
    assert units.num_stages == 4
    assert as_one(units, GRAPH, 1) is None
    assert as_one(units, GRAPH, 0).schedule.units == (1, 2)
    assert as_one(as_one(units, GRAPH, 0), GRAPH, 1).changed(decisions=()) == plan


def test_what_is_one_is_gathered_at_once() -> None:
    plan = replicas([0, 1, 2]).changed(shard=("shard",) * 4)

    def gathers(of):
        code = lower_plan(of, GRAPH).code[0]
        return [one.stage for one in code if isinstance(one, Unshard)]

    assert gathers(plan) == [0, 1, 2, 3, 2, 1, 0]
    assert gathers(as_one(plan, GRAPH, 1)) == [0, 1, 2, 1, 0]


@pytest.mark.parametrize("latency_s", [0.001, 0.05])
@pytest.mark.sampled(2)
def test_gathers_are_as_many_as_are_fastest(latency_s: float) -> None:
    there = cluster_of(2, link=Link(latency_s, 4e4))
    judge, least = Judge(GRAPH, PROFILE, there), float("inf")
    most = 0.8 * max(judge.candidate(replicas([])).peak_bytes)
    there = replace(
        there, devices=tuple(replace(kind, memory_bytes=int(most)) for kind in there.devices)
    )
    judge = Judge(GRAPH, PROFILE, there)
    for cuts in itertools.chain.from_iterable(
        itertools.combinations(range(3), n) for n in range(4)
    ):
        bare = replicas(cuts)
        for words in itertools.product(WORDS, repeat=len(cuts) + 1):
            fetched = any(word != "replicate" for word in words)
            for ahead in (0, 1) if fetched else (0,):
                made = judge.candidate(bare.changed(shard=words, prefetch=ahead))
                least = least if made.refused else min(least, made.step_s)
    asked = Fixed(ranks=2, replicas=2, recompute=False)
    found = search(GRAPH, PROFILE, there, micro_batches=4, fixed=asked).plan
    assert found.predicted.step_s <= 1.02 * least
