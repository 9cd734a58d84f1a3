"""Ranks dealt to hosts of several devices, against every way to put them there."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.graph import Graph
from penstock.plan import plan_by_hand
from penstock.profile import Profile
from penstock.schedule.grid import Grid
from penstock.search import Fixed, JobNeeds, evaluate, search
from penstock.search.dealt import orders_by_rank
from penstock.search.search import SearchResult
from tests.draws import examples
from tests.search.chains import chain, profile_of

NEAR, FAR = Link(0.001, 2000.0), Link(0.01, 40.0)
KIND = DeviceKind("d", 10**9, (), 1.0)
TWO = Cluster((KIND,), (Host("a", "d", 2), Host("b", "d", 2)), NEAR, FAR)
MICRO_BATCHES = 4


def everywhere(graph: Graph, profile: Profile, schedule: str, replicas: int) -> float:
    """Return the least seconds of all ways to deal four ranks to two hosts, and all cuts."""
    stages = 2
    count = MICRO_BATCHES // replicas
    least = float("inf")
    for cuts in itertools.combinations(range(len(graph.cut_points)), stages - 1):
        plan = plan_by_hand(
            graph,
            cuts,
            schedule,
            num_micro_batches=count,
            replicas=replicas,
            num_ranks=4 // replicas,
        )
        for hosts in sorted({*itertools.permutations("aabb")}):
            made, _ = evaluate(graph, profile, TWO, plan.changed(hosts=hosts, early=4))
            least = min(least, made.step_s)
    return least


def found(graph: Graph, profile: Profile, fixed: Fixed) -> SearchResult:
    return search(graph, profile, TWO, micro_batches=MICRO_BATCHES, fixed=fixed)


@examples(6)
@given(
    st.lists(st.sampled_from([1, 20, 400]), min_size=4, max_size=4),
    st.lists(st.sampled_from([1, 20, 400]), min_size=4, max_size=4),
    st.sampled_from([("one_f_one_b", 2), ("dapple(ranks=2-2)", 1), ("dapple(ranks=3-1)", 1)]),
)
def test_no_way_to_deal_ranks_to_hosts_is_faster(weights, values, pair: tuple[str, int]) -> None:
    graph, (schedule, replicas) = chain(weights, values), pair
    profile = profile_of(graph, [1.0, 2.0, 1.0, 1.5])
    fixed = Fixed(ranks=4, replicas=replicas, schedule=schedule, stages=2, recompute=False)
    plan = found(graph, profile, fixed).plan
    best = everywhere(graph, profile, schedule, replicas)
    assert plan.predicted.step_s <= best * (1 + 1e-9)


def test_heavy_weights_are_summed_inside_a_host_and_heavy_values_stay_inside() -> None:
    fixed = Fixed(
        ranks=4, replicas=2, schedule="one_f_one_b", recompute=False, needs=JobNeeds(whole=True)
    )
    rows = chain([400] * 4, [1] * 4), chain([1] * 4, [400] * 4)
    heavy, light = (found(graph, profile_of(graph, [1.0] * 4), fixed).plan for graph in rows)
    assert heavy.place.hosts == ("a", "b", "a", "b")
    (hosts,) = (each for each in heavy.decisions if each.what == "hosts")
    assert hosts.value == "a (ranks 0, 2 on d), b (ranks 1, 3 on d)"
    assert "on a, b, one_f_one_b" in hosts.why
    assert light.place.hosts == ()


def test_hosts_that_stay_as_placed_are_not_dealt() -> None:
    graph = chain([400] * 4, [1] * 4)
    fixed = Fixed(ranks=4, replicas=2, schedule="one_f_one_b", needs=JobNeeds(as_placed=True))
    plan = found(graph, profile_of(graph, [1.0] * 4), fixed).plan
    assert plan.place.hosts == ()


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "by_stage", "by_turns"),
    [
        ("aabb", 2, "abab", "abab"),
        ("aaaabb", 2, "aaabab", "ababaa"),
        ("aabb", 4, "aabb", "abab"),
        ("aaabbb", 3, "aababb", "ababab"),
    ],
)
def test_orders_put_ranks_of_a_stage_together_or_take_turns(
    hosts: str, num_ranks: int, by_stage: str, by_turns: str
) -> None:
    assert ["".join(row) for row in orders_by_rank([*hosts], num_ranks)] == [by_stage, by_turns]


def test_ranks_that_divide_ops_are_together_where_those_of_a_stage_are() -> None:
    grid = Grid(2, (4, 4, 4, 4), tensor=2)
    by_stage, _ = orders_by_rank([*"aaaabbbb"], grid.num_ranks)
    assert all(len({by_stage[each] for each in grid.tensor_group(rank)}) == 1 for rank in range(8))
