"""Units that are searched for: the best of all, in small models; never worse than usual ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.plan import plan_by_hand
from penstock.search import cut_units
from penstock.search.cut_units import in_best_units, settings
from penstock.search.judge import Judge
from tests.draws import examples
from tests.search.chains import chain, cluster_of, profile_of

MB = 10**6


def judge_of(seconds, megabytes, rate, latency_s=1e-3, **memory):
    graph = chain([size * MB for size in megabytes], [1] * len(megabytes))
    cluster = cluster_of(2, link=Link(latency_s, rate), **memory)
    return Judge(graph, profile_of(graph, seconds), cluster)


def replicas(judge):
    return plan_by_hand(judge.graph, [], "gpipe", num_micro_batches=2, replicas=2)


def by_hand(seconds, megabytes, rate, latency_s, points):
    """Return the seconds of a step of two replicas: two F, two B, and buckets one after another.

    A bucket of n bytes takes two rounds of half of it; it begins when the last B of its unit ends.
    """
    ends, last = (*points, len(seconds) - 1), len(seconds)
    back = [each * 2 for each in seconds]
    back[0] = seconds[0]  # it hands no gradient on
    now, over = 2 * sum(seconds) + sum(back), 0.0
    for first in reversed((0, *(end + 1 for end in ends[:-1]))):
        now += sum(back[first:last])
        size = sum(megabytes[first:last]) * MB
        over = max(over, now) + 2 * (latency_s + size / 2 / rate)
        last = first
    return over


@examples(8)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=2, max_size=4),
    st.sampled_from([1e8, 1e9, 1e10]),
)
def test_searched_units_are_never_worse_than_usual_ones_nor_than_any_with_a_cut_more_or_less(
    rows, rate
):
    seconds, megabytes = [each / 1000 for each, _ in rows], [size for _, size in rows]
    judge = judge_of(seconds, megabytes, rate)
    plan = replicas(judge)
    found = in_best_units(judge, plan)
    assert set(found.usual_s) == {"whole", "block", "25 MB", "each"}
    assert found.candidate.step_s <= min(found.usual_s.values())
    cuts = set(found.candidate.plan.cuts)
    for point in range(len(rows) - 1):  # none of the changes by one cut is better
        other_s = by_hand(seconds, megabytes, rate, 1e-3, tuple(sorted(cuts ^ {point})))
        assert other_s >= found.candidate.step_s * (1 - 1.1e-3)
    own = by_hand(seconds, megabytes, rate, 1e-3, found.candidate.plan.cuts)
    assert found.candidate.step_s == pytest.approx(own)


def test_units_that_no_usual_setting_has_are_found():
    """The sum of all but the first layer ends in the last backward; that of the first is short."""
    seconds, megabytes = [0.05, 0.01, 0.01, 0.01], [1, 5, 5, 5]
    judge = judge_of(seconds, megabytes, 1e9, latency_s=2e-2)
    found = in_best_units(judge, replicas(judge))
    assert (found.setting, found.candidate.plan.cuts) == ("searched", (0,))


def test_buckets_are_cut_where_25_mb_have_come_together_from_the_end():
    judge = judge_of([0.01] * 6, [30, 1, 20, 10, 26, 27], 1e9)
    assert settings(judge.graph, replicas(judge))["25 MB"] == (2, 4)
    assert settings(judge.graph, replicas(judge))["each"] == (0, 1, 2, 3, 4)
    cut = plan_by_hand(judge.graph, [2], "gpipe", num_micro_batches=2, replicas=1)
    assert settings(judge.graph, cut)["25 MB"] == (4,)


def test_a_search_of_large_plans_looks_at_the_usual_settings_only(monkeypatch):
    judge = judge_of([0.01, 0.02, 0.01, 0.03], [5, 40, 1, 9], 2e9)
    monkeypatch.setattr(cut_units, "_MOST_ACTIONS", 0)
    monkeypatch.setattr(cut_units, "_MOST_POINTS", 2)
    found = in_best_units(judge, replicas(judge))
    assert found.setting in found.usual_s
    assert set(found.usual_s) == {"whole", "block", "25 MB"}


def test_units_for_which_there_is_no_memory_count_for_nothing():
    judge = judge_of([0.01] * 3, [1, 1, 1], 1e9)
    small = cluster_of(2, link=Link(0.0, 1e9), memory_bytes=10)
    none = Judge(judge.graph, judge.profiles, small)
    assert in_best_units(none, replicas(judge)) is None
