"""Bits on the wire: the search packs messages where the job allows it and it pays."""

import itertools
from dataclasses import replace
from functools import cache

import pytest

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.graph.graph import Graph
from penstock.profile import Profile
from penstock.profile.profile import PackCost
from penstock.search import Fixed, RankExchange, evaluate, search
from penstock.search.candidate import Candidate
from penstock.search.judge import Judge
from penstock.search.simplest import exactest
from tests.search.chains import chain, profile_of

BITS = (4, 8, 16)


@cache
def floats() -> tuple[Graph, Profile]:
    """Return a chain of float32 layers of 1 ms, and what packing costs on it."""
    graph = chain([64] * 4, [4096] * 4)
    nodes = tuple(replace(n, dtype="float32", shape=(n.size_bytes // 4,)) for n in graph.nodes)
    graph = replace(graph, nodes=nodes)
    costs = tuple(PackCost(bits, 2e-5, 1e-9, 1e-5, 1e-9) for bits in BITS)
    return graph, replace(profile_of(graph, [1e-3] * 4), packing=costs)


def cluster_of(bytes_per_s: float) -> Cluster:
    device = DeviceKind("d", 10**9, (("float32", 1e9),), 1e9)
    return Cluster((device,), (Host("h", "d", 2),), Link(1e-5, bytes_per_s))


def found_on(bytes_per_s: float, fewest: tuple[int, int], error: float = 0.05):
    graph, profile = floats()
    fixed = Fixed(stages=2, replicas=1, schedule="one_f_one_b", exchange=RankExchange(wire=fewest))
    return search(
        graph, profile, cluster_of(bytes_per_s), micro_batches=4, fixed=fixed, error=error
    )


def reason(plan) -> str:
    return "; ".join(f"{each.value}: {each.why}" for each in plan.decisions if each.what == "wire")


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 3e6, 1e7, 1e9])
@pytest.mark.parametrize("fewest", [(4, 4), (8, 16), (32, 4)])
def test_most_bits_are_kept_that_leave_the_step_within_the_error(bytes_per_s, fewest):
    graph, profile = floats()
    found = found_on(bytes_per_s, fewest).plan
    judge = Judge(graph, profile, cluster_of(bytes_per_s))
    allowed = [[bits for bits in (*BITS, 32) if bits >= least] for least in fewest]
    tried = {w: judge.candidate(found.changed(wire=w)) for w in itertools.product(*allowed)}
    assert found.terms.wire in tried
    limit = 1.05 * min(tried[w].step_s for w in (fewest, (32, 32)))
    close = [w for w, each in tried.items() if each.step_s <= limit]
    assert sum(found.terms.wire) == max(map(sum, close))
    assert found.predicted.step_s == tried[found.terms.wire].step_s <= limit
    assert reason(found)


def test_messages_stay_as_they_are_where_the_job_does_not_allow_it_or_links_are_fast():
    assert found_on(1e5, (32, 32)).plan.terms.wire == (32, 32)
    assert reason(found_on(1e5, (32, 32)).plan) == ""
    fast = found_on(1e10, (4, 4)).plan
    assert fast.terms.wire == (32, 32)
    assert "as the job allows, would take" in reason(fast)


def test_slow_link_is_used_because_messages_are_packed():
    graph, profile = floats()
    cluster, sizes = cluster_of(1e6), {"micro_batches": 4}
    alone = search(graph, profile, cluster, **sizes).plan
    packed = search(
        graph,
        profile,
        cluster,
        **sizes,
        fixed=Fixed(replicas=1, exchange=RankExchange(wire=(4, 4))),
    ).plan
    exact = search(graph, profile, cluster, **sizes, fixed=Fixed(replicas=1)).plan
    assert packed.predicted.step_s < exact.predicted.step_s
    assert packed.terms.wire != (32, 32)
    assert "0.071 of the greatest" in reason(packed)
    assert not alone.terms.rounds
    candidate, _ = evaluate(graph, profile, cluster, packed)
    assert candidate.step_s == packed.predicted.step_s


def test_plan_that_does_not_round_is_left_as_it_is():
    graph, profile = floats()
    plan = found_on(1e10, (32, 32)).plan
    candidate = Candidate(plan, 1.0, (1,), 0.0)
    judge = Judge(graph, profile, cluster_of(1e10))
    assert exactest(judge, candidate, (4, 4), "time", 9.0) is candidate


def test_cost_of_packing_is_that_of_its_bits_or_the_slowest():
    profile = replace(
        floats()[1], packing=(PackCost(8, 1.0, 0.1, 2.0, 0.2), PackCost(16, 3.0, 0.0, 0.0, 0.0))
    )
    assert profile.packing_s(8, [10, 20]) == pytest.approx((5.0, 10.0))
    assert profile.packing_s(16, [10, 20]) == pytest.approx((6.0, 0.0))
    assert profile.packing_s(5, [10, 20]) == pytest.approx((6.0, 10.0))
    assert replace(profile, packing=()).packing_s(8, [10]) == (0.0, 0.0)
    assert Profile.from_json(profile.to_json(), "p") == profile
