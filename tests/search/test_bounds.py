"""Bounds are below what is simulated, and on plain pipelines not far below."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.graph import Graph
from penstock.graph.trace import trace
from penstock.plan import plan_by_hand
from penstock.profile.estimate import estimated
from penstock.search import Candidate
from penstock.search.judge import Judge
from penstock.search.shapes import Fixed, shapes
from tests.draws import examples
from tests.graph.zoo import JOBS
from tests.search.chains import chain, chains, cluster_of, profile_of

LINK = Link(0.01, 20.0, overhead_s=0.01)
OBJECTIVES = "time", "cost", "memory"


def check(judge: Judge, count: int, recompute: bool, cuts_of, *, clip: bool = False) -> None:
    """Check the bounds of a plan of each shape."""
    for shape in shapes(judge.graph, judge.cluster, count, Fixed()):
        plan = plan_by_hand(
            judge.graph,
            cuts_of(shape.stages - 1),
            shape.schedule,
            num_micro_batches=max(shape.shares),
            num_ranks=shape.num_ranks,
            replicas=shape.replicas,
            shares=shape.shares[::-1],
            recompute=(recompute,) * shape.stages,
            clip=clip,
        )
        found: Candidate = judge.candidate(plan)
        for objective in OBJECTIVES:
            if found.peak_bytes:
                score = found.score(objective)[0]
                assert judge.rough(plan, objective) <= score
                assert judge.bound(plan, objective) <= score
        if found.peak_bytes and len(judge.cluster.hosts) == 1:  # messages do not wait there
            assert judge.bound(plan, "memory") == max(found.peak_bytes)


@examples(10)
@given(
    chains(2, 5),
    st.integers(1, 3),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_bounds_are_below_every_simulation(
    pair, ranks: int, count: int, recompute: bool, clip: bool, data: st.DataObject
) -> None:
    graph, profile = pair
    ways = {
        k: list(itertools.combinations(range(len(graph.cut_points)), k))
        for k in range(len(graph.cut_points) + 1)
    }
    judge = Judge(graph, profile, cluster_of(ranks, link=LINK, usd_per_hour=3.0))
    check(judge, count, recompute, lambda k: data.draw(st.sampled_from(ways[k])), clip=clip)


@pytest.mark.parametrize("name", ["blocks", "tied", "unet", "encoder_decoder"])
@pytest.mark.sampled(2)
def test_bounds_are_below_simulations_of_traced_models_on_unlike_devices(name: str) -> None:
    graph: Graph = trace(JOBS[name])
    kinds = tuple(
        DeviceKind(n, 1 << 40, (("float32", rate), ("bfloat16", rate)), rate / 10, 1.0)
        for n, rate in (("a", 1e9), ("b", 3e9))
    )
    hosts = tuple(Host(kind.name, kind.name, 1) for kind in kinds)
    cluster = Cluster(kinds, hosts, between=Link(1e-5, 1e9))
    judge = Judge(graph, [estimated(graph, kind, 2.0) for kind in kinds], cluster)
    for recompute in (False, True):
        check(judge, 4, recompute, lambda k: range(len(graph.cut_points))[:k], clip=recompute)


def test_bounds_are_below_whichever_op_is_slow() -> None:
    """Also the sum of a tied weight's gradient, which stages that have a part each do not make."""
    graph: Graph = trace(JOBS["tied"])
    even = profile_of(graph, [0.0] * len(graph.nodes))
    plan = plan_by_hand(graph, (0,), "one_f_one_b", num_micro_batches=2)
    for slow in range(len(graph.nodes)):
        if graph.nodes[slow].phase == "B":
            op_s = tuple(float(op == slow) for op in range(len(graph.nodes)))
            judge = Judge(graph, replace(even, op_s=op_s), cluster_of(2))
            step_s = judge.candidate(plan).step_s
            assert judge.rough(plan, "time") <= step_s
            assert judge.bound(plan, "time") <= step_s


def test_rough_bound_of_a_pipeline_is_its_step_but_for_messages() -> None:
    graph = chain([1] * 4, [1] * 4)
    judge = Judge(graph, profile_of(graph, [1] * 4), cluster_of(4))
    plan = plan_by_hand(graph, (0, 1, 2), "one_f_one_b", num_micro_batches=6)
    found = judge.candidate(plan)
    assert judge.rough(plan, "time") == pytest.approx(found.step_s, rel=0.05)


def test_sums_over_replicas_and_updates_are_in_the_bound_but_not_in_the_rough_one() -> None:
    graph = chain([1000], [1])
    profile = profile_of(graph, [1], update_s=5.0)
    judge = Judge(graph, profile, cluster_of(2, link=Link(0.0, 100.0)))
    plan = plan_by_hand(graph, (), "one_f_one_b", num_micro_batches=2, replicas=2)
    assert judge.rough(plan, "time") == pytest.approx(2 * 2)
    assert judge.bound(plan, "time") == pytest.approx(2 * 2 + 10 + 5)
    assert judge.candidate(plan).step_s == pytest.approx(2 * 2 + 10 + 5)
