"""Delayed sums: a step takes the longer of its computes and its sums, and else their sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.search.judge import Judge
from penstock.sums import sums_way
from tests.draws import examples
from tests.search.chains import chain, cluster_of, profile_of

MB, LATENCY_S = 10**6, 1e-3


@examples(10)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=4),
    st.sampled_from([1e8, 1e9, 1e10]),
)
def test_a_step_takes_the_longer_of_computes_and_sums(rows, rate):
    seconds, sizes = [each / 1000 for each, _ in rows], [size * MB for _, size in rows]
    graph = chain(sizes, [1] * len(sizes))
    judge = Judge(graph, profile_of(graph, seconds), cluster_of(2, link=Link(LATENCY_S, rate)))
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=2)
    back_s = 2 * sum(seconds) - seconds[0]  # the first hands no gradient on
    computes_s = 2 * sum(seconds) + 2 * back_s
    sums_s = 2 * (LATENCY_S + sum(sizes) / 2 / rate)
    late = judge.candidate(plan.changed(sums="delayed"))
    assert late.step_s == pytest.approx(max(computes_s, sums_s), rel=1e-3)
    assert late.step_s <= judge.candidate(plan).step_s + 1e-9


@given(st.integers(2, 6))
def test_gradients_under_way_are_counted(k):
    """Those of K - 1 steps, and a sum: K times the gradients more than without."""
    graph = chain([MB, 2 * MB], [1, 1])
    judge = Judge(graph, profile_of(graph, [0.001, 0.002]), cluster_of(2))
    plan = plan_by_hand(graph, [], "gpipe", num_micro_batches=2, replicas=2)
    own, late = (
        judge.candidate(plan.changed(sums=sums)).peak_bytes for sums in (None, f"delayed:{k}")
    )
    assert [b - a for a, b in zip(own, late, strict=True)] == [k * 3 * MB] * 2


@pytest.mark.parametrize(
    "text", ["delayed:1", "delayed:", "delayed:0.5", "delayed:x", "delayed:1025"]
)
def test_a_number_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a whole number from 2 to 1024"):
        sums_way(text)
    assert (sums_way("delayed"), sums_way("delayed:3").late) == (sums_way("delayed:2"), 2)
