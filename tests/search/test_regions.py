"""Plans over regions: few bytes cross slow links, once; the plan says what crosses them."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.search import Fixed, evaluate
from penstock.search import search as searched
from penstock.search.crossing import crossing
from penstock.search.judge import Judge
from penstock.search.polish import with_cuts
from tests.search.chains import chain, profile_of

KIND = DeviceKind("d", 10**9, (("float32", 1.0),), 1.0)
NEAR = Link(1e-4, 1e3)
PLAIN = Fixed(schedule="one_f_one_b", recompute=False)


def found_by(graph, profile, cluster, micro_batches=4, **fixed):
    """Return the plan that is found."""
    asked = replace(PLAIN, **fixed)
    return searched(graph, profile, cluster, micro_batches=micro_batches, fixed=asked).plan


def apart(regions: str, latency_s: float, bytes_per_s: float) -> Cluster:
    """Return hosts a, b, ... of one rank, in the region of the letter at their place."""
    names = "abcdef"[: len(regions)]
    rows = zip(names, regions, strict=True)
    pairs = tuple(
        HostPair(one, other, latency_s, bytes_per_s)
        for (one, r), (other, s) in itertools.combinations(rows, 2)
        if r != s
    )
    return Cluster((KIND,), tuple(Host(n, "d", 1) for n in names), between=NEAR, pairs=pairs)


@st.composite
def cases(draw):
    count = draw(st.integers(4, 5))
    whole = st.integers(1, 9)
    values = [draw(st.sampled_from([1, 5, 20, 100])) for _ in range(count)]
    graph = chain([draw(st.integers(1, 400)) for _ in range(count)], values)
    profile = profile_of(graph, [draw(whole) for _ in range(count)])
    regions = draw(st.sampled_from(["xyx", "xxy", "yxx"]))
    return graph, profile, apart(regions, 0.01, draw(st.sampled_from([100.0, 20.0, 5.0])))


@settings(max_examples=8)
@given(cases())
def test_pipeline_over_regions_is_the_best_of_all_cuts_and_orders_of_hosts(case):
    graph, profile, cluster = case
    plan = found_by(graph, profile, cluster, ranks=3, stages=3, replicas=1)
    own = evaluate(graph, profile, cluster, plan)[0].step_s
    judge, least = Judge(graph, profile, cluster), float("inf")
    for order in itertools.permutations(host.name for host in cluster.hosts):
        for cuts in itertools.combinations(range(len(graph.cut_points)), 2):
            other = with_cuts(graph, plan, cuts)
            least = min(least, judge.candidate(other.changed(hosts=order)).step_s)
    assert own == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("regions", ["xyxyxy", "xxyyxy"])
def test_sums_stay_inside_regions_and_pipelines_cross_once(regions):
    """Weights are large and values small, so that to sum between regions would be slow."""
    graph = chain([400] * 6, [10] * 6)
    profile, cluster = profile_of(graph, [1, 1, 2, 1, 1, 2]), apart(regions, 0.01, 5.0)
    plan = found_by(graph, profile, cluster, 6, ranks=6)
    (told,) = crossing(Judge(graph, profile, cluster), plan)
    assert told in plan.decisions
    hosts = plan.place.hosts or tuple("abcdef")
    region = [regions["abcdef".index(name)] for name in hosts]
    for replica in range(plan.replicas):
        own = [region[rank] for rank in plan.grid.ranks_of(replica)]
        assert len([1 for a, b in itertools.pairwise(own) if a != b]) == 1
    assert plan.replicas > 1
    times = (1 / 5.0 + 0.01 / 2**19) / (1 / 1e3 + 1e-4 / 2**19)
    assert f"a byte takes {times:.3g} times as long between them" in told.why
    assert re.search(r"messages of 12\d B a step cross, after layers.\d; no sum does", told.why)


def test_regions_are_told_only_where_there_are_several_and_idle_ones_too():
    graph = chain([400] * 4, [50] * 4)
    profile = profile_of(graph, [1, 1, 1, 1])
    near = apart("xxx", 0.01, 5.0)
    plan = found_by(graph, profile, near)
    assert not list(crossing(Judge(graph, profile, near), plan))
    far = apart("xxyx", 100.0, 0.1)
    plan = found_by(graph, profile, far, 6)
    (told,) = crossing(Judge(graph, profile, far), plan)
    assert "c (idle)" in told.value
    assert "no message crosses; no sum does" in told.why


def test_hosts_without_any_link_between_them_are_of_two_regions():
    graph = chain([4] * 3, [5] * 3)
    profile = profile_of(graph, [1, 1, 1])
    hosts = tuple(
        Host(name, "d", 2, region) for name, region in (("a", "x"), ("b", "x"), ("c", "y"))
    )
    cluster = Cluster((KIND,), hosts, inside=NEAR, between=NEAR)
    plan = found_by(graph, profile, cluster, ranks=2)
    (told,) = crossing(Judge(graph, profile, cluster), plan)
    assert told.value == "a, b (ranks 0-1); c (idle)"
