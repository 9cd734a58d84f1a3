"""Averages of weights: a step takes its computes and, in the mean, a part of an average."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.search.judge import Judge
from tests.draws import examples
from tests.search.chains import chain, cluster_of, profile_of

MB, LATENCY_S = 10**6, 1e-3


@examples(10)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=4),
    st.sampled_from(["local", "diloco", "easgd", "gossip"]),
    st.integers(1, 16),
    st.sampled_from([2, 4]),
)
def test_a_step_takes_its_computes_and_a_part_of_an_average(rows, kind, every, replicas):
    seconds, sizes = [each / 1000 for each, _ in rows], [size * MB for _, size in rows]
    graph, rate = chain(sizes, [1] * len(sizes)), 1e9
    cluster = cluster_of(replicas, link=Link(LATENCY_S, rate))
    judge = Judge(graph, profile_of(graph, seconds), cluster)
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=replicas)
    back_s = 2 * sum(seconds) - seconds[0]  # the first hands no gradient on
    among = 2 if kind == "gossip" else replicas
    average_s = 2 * (among - 1) * (LATENCY_S + sum(sizes) / among / rate)
    late = judge.candidate(plan.changed(sums=f"{kind}:{every}"))
    assert late.step_s == pytest.approx(2 * sum(seconds) + 2 * back_s + average_s / every, rel=1e-3)


@pytest.mark.parametrize(("way", "copies"), [("local:2", 0), ("diloco:2", 2), ("easgd:2", 2)])
def test_a_plan_counts_what_replicas_remember(way, copies):
    graph = chain([MB], [1])
    judge = Judge(graph, profile_of(graph, [0.001]), cluster_of(2, link=Link(LATENCY_S, 1e9)))
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=2)
    (first, *_), (then, *_) = (
        judge.candidate(each).peak_bytes for each in (plan, plan.changed(sums=way))
    )
    assert then - first == copies * MB
