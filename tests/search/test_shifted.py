"""Micro-batches shared otherwise: by brute force the best, and nothing has to move."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pilot.slow_ranks import slowed
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan
from penstock.search.judge import Judge
from penstock.search.shifted import by_speed, keeps_state, shifted
from tests.draws import examples
from tests.search.chains import chain, cluster_of, profile_of

GRAPH = chain([5, 5, 5, 5], [3, 3, 3, 3])
PROFILE = replace(profile_of(GRAPH, [1.0, 1.0, 1.0, 1.0]), kind="d")


def judge_of(factors):
    there = slowed(cluster_of(len(factors)), factors)
    return Judge(GRAPH, there.profiles([PROFILE]), there.cluster)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), st.integers(0, 12))
def test_shares_by_speed_end_soonest(speeds, more):
    total = len(speeds) + more

    def end(shares):
        return max(s / speed for s, speed in zip(shares, speeds, strict=True))

    ways = itertools.product(range(1, more + 2), repeat=len(speeds))
    least = min(end(shares) for shares in ways if sum(shares) == total)
    found = by_speed(total, speeds)
    assert sum(found) == total
    assert end(found) == pytest.approx(least)


@examples(12)
@given(st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.0]), min_size=2, max_size=3), st.integers(2, 4))
def test_shares_are_the_best_of_all(factors, count):
    ranks, judge = len(factors), judge_of(factors)
    plan = plan_by_hand(GRAPH, (), "one_f_one_b", num_micro_batches=count, replicas=ranks)
    found = shifted(judge, plan)
    total = count * ranks
    every = itertools.product(range(1, total), repeat=ranks)
    ways = [shares for shares in every if sum(shares) == total]
    made = (plan.changed(shares=s, num_micro_batches=max(s)) for s in ways)
    least = min(judge.candidate(each, as_said=True).step_s for each in made)
    step_s = judge.candidate(plan, as_said=True).step_s if found is None else found.step_s
    assert step_s == pytest.approx(least)


def test_back_to_even_shares_where_all_are_alike():
    judge = judge_of((1.0, 1.0))
    plan = plan_by_hand(
        GRAPH, (), "one_f_one_b", num_micro_batches=6, replicas=2, shares=(6, 2)
    )  # fmt: skip
    found = shifted(judge, plan)
    assert found is not None
    assert found.plan.grid.shares == (4, 4)


def test_ranks_of_one_stage_take_other_turns():
    judge = judge_of((1.0, 4.0, 1.0))
    schedule = "dapple(ranks=2-1)"
    plan = plan_by_hand(GRAPH, (1,), schedule, num_micro_batches=8, num_ranks=3)
    found = shifted(judge, plan)
    assert found is not None
    assert found.plan.replicas == 1
    own, made = (lower_plan(each, GRAPH) for each in (plan, found.plan))
    assert keeps_state(own, made)
    assert found.step_s < judge.candidate(plan, as_said=True).step_s


def test_plans_that_hold_other_stages_do_not_keep_their_state():
    make = {"num_micro_batches": 4, "num_ranks": 2}
    one, other = (plan_by_hand(GRAPH, (cut,), "one_f_one_b", **make) for cut in (0, 2))
    three = plan_by_hand(GRAPH, (0, 2), "interleaved", **{**make, "num_micro_batches": 6})
    whole = plan_by_hand(GRAPH, (), "one_f_one_b", num_micro_batches=4, replicas=2)
    split = plan_by_hand(
        GRAPH, (), "one_f_one_b", num_micro_batches=4, replicas=2, shard=("shard",)
    )  # fmt: skip
    programs = [lower_plan(each, GRAPH) for each in (one, three, whole, split)]
    for a, b in itertools.permutations(programs, 2):
        assert not keeps_state(a, b)
    assert keeps_state(programs[0], lower_plan(other, GRAPH))  # stages are the caller's to compare


def test_asynchronous_plans_and_buffers_per_replica_stay():
    judge = judge_of((1.0, 2.0))
    plan = plan_by_hand(GRAPH, (1,), "double_buffered", num_micro_batches=4, num_ranks=2)
    assert shifted(judge, plan) is None
    pair = plan_by_hand(GRAPH, (), "one_f_one_b", num_micro_batches=4, replicas=2)
    assert shifted(judge, pair.changed(buffers="per replica")) is None
    assert shifted(judge, pair) is not None
    assert shifted(judge, pair.changed(num_micro_batches=1)) is None
