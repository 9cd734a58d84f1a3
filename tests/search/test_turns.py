"""Stages on unlike numbers of ranks: chosen where that is best, and by speed where ranks differ."""

from dataclasses import replace

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.plan import plan_by_hand
from penstock.search import Fixed, evaluate
from penstock.search.search import search
from penstock.search.turns import in_turn
from tests.search.chains import chain, cluster_of, profile_of

GRAPH = chain([10, 10, 10, 4000], [40] * 4)  # long stages of few weights, then one of many
LINK = Link(0.01, 300.0)  # over which a sum of these takes long
PLAIN = profile_of(GRAPH, [1.0] * 4)


def test_a_stage_is_on_several_ranks_where_others_have_the_weights():
    fixed = Fixed(schedule="dapple")
    plan = search(GRAPH, PLAIN, cluster_of(3, link=LINK), micro_batches=12, fixed=fixed).plan
    assert (plan.replicas, plan.num_stages, plan.num_ranks) == (1, 2, 3)
    assert plan.schedule.name == "dapple(ranks=2-1)"
    assert plan.cuts == (2,)  # the weights stand on one rank
    whole = plan_by_hand(GRAPH, [], "one_f_one_b", num_micro_batches=4, replicas=3)
    pipe = plan_by_hand(GRAPH, [0, 2], "one_f_one_b", num_micro_batches=12)
    for other in (whole, pipe):
        other, _ = evaluate(GRAPH, PLAIN, cluster_of(3, link=LINK), other)
        assert plan.predicted.step_s < 0.9 * other.step_s


def mixed() -> Cluster:
    kinds = DeviceKind("a", 10**9, (), 1.0), DeviceKind("b", 10**9, (), 1.0)
    hosts = Host("x", "a", 1), Host("y", "b", 1), Host("z", "a", 1)
    return Cluster(kinds, hosts, LINK, LINK, LINK)


def test_ranks_of_a_stage_take_as_many_micro_batches_as_they_are_fast():
    fast = replace(PLAIN, kind="a")
    slow = replace(PLAIN, op_s=tuple(2 * s for s in PLAIN.op_s), kind="b")
    fixed = Fixed(ranks=3, schedule="dapple(ranks=2-1)")
    plan = search(GRAPH, (fast, slow), mixed(), micro_batches=12, fixed=fixed).plan
    turns = plan.schedule.name.partition("ranks=")[2].rstrip(")")
    assert turns.endswith("-1")
    hosts = plan.place.hosts or ("x", "y", "z")
    assert "y" in hosts[:2]  # the slow rank is one of two
    first, second = map(int, turns.partition("-")[0].split("+"))
    assert (first > second) == (hosts[1] == "y")
    as_many = plan.changed(schedule="dapple(ranks=2-1)")
    even, _ = evaluate(GRAPH, (fast, slow), mixed(), as_many)
    assert plan.predicted.step_s < 0.9 * even.step_s


def test_turns_are_small_numbers_as_the_speeds_are():
    assert in_turn((2.0, 1.0)) == (2, 1)
    assert in_turn((0.2, 0.31, 0.1)) == (2, 3, 1)
    assert in_turn((7.0, 7.0)) == (1, 1)
    assert in_turn((1.5, 1.01, 1.0)) == (3, 2, 2)
