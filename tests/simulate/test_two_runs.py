"""Two runs on the same cores: closed forms of what they take together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.simulate.two_runs import SideBySide, makespans, share_of, works_of
from penstock.timeline.spans import Span
from penstock.timeline.timeline import Timeline

seconds = st.floats(0.1, 2.0)


def step(compute_s: float, sum_s: float, ranks: int = 2) -> Timeline:
    """Return the timeline of replicas that compute, sum and update in no time."""
    spans = []
    for rank in range(ranks):
        spans.append(Span(rank, "compute", "B", 0, 0, 0.0, compute_s))
        spans.append(Span(rank, "collective", "reduce", -1, 0, compute_s, compute_s + sum_s))
        end_s = compute_s + sum_s
        spans.append(Span(rank, "update", "U", 0, 0, end_s, end_s))
    return Timeline.of(ranks, spans)


def alike(compute_s: float, sum_s: float, steps: int = 10, share: float = 0.0) -> SideBySide:
    return SideBySide(step(compute_s, sum_s), steps, share)


@given(seconds, st.integers(1, 40))
def test_runs_that_only_compute_gain_nothing(compute_s, steps):
    found = makespans(alike(compute_s, 0.0, steps), alike(compute_s, 0.0, steps))
    assert found.by_turns_s == pytest.approx(found.one_by_one_s, rel=1e-3)
    assert found.at_once_s == pytest.approx(found.one_by_one_s, rel=1e-3)


@given(seconds, st.integers(2, 40))
def test_sums_as_long_as_computes_hide_behind_those_of_the_other_run(each_s, steps):
    """While one computes the other sums; the last sum has nothing beside it."""
    run = alike(each_s, each_s, steps)
    found = makespans(run, run)
    assert found.one_by_one_s == pytest.approx(4 * steps * each_s)
    assert found.by_turns_s == pytest.approx((2 * steps + 1) * each_s, rel=0.03)


@given(seconds, seconds, seconds, seconds)
def test_no_resource_is_used_twice_at_a_time(a, b, c, d):
    first, second = alike(a, b), alike(c, d)
    found = makespans(first, second)
    least = max(10 * (a + c), 10 * (b + d), first.alone_s, second.alone_s)
    for together_s in found.by_turns_s, found.at_once_s:
        assert 0.97 * least <= together_s <= 1.01 * found.one_by_one_s


def test_sums_that_take_the_whole_core_leave_nothing_to_gain():
    run = alike(1.0, 1.0, share=1.0)
    found = makespans(run, run)
    assert found.by_turns_s == pytest.approx(found.one_by_one_s, rel=0.06)


def test_rest_of_the_longer_run_goes_on_alone():
    found = makespans(alike(1.0, 0.0, 2), alike(1.0, 0.0, 100))
    assert found.by_turns_s == pytest.approx(102.0, rel=1e-2)


def test_sum_is_one_work_of_all_its_ranks_behind_the_last_of_them():
    works = works_of(step(1.0, 0.5))
    sums = [work for work in works if not work.on_core]
    assert [sorted(work.ranks) for work in sums] == [[0, 1]]
    assert {works[at].ranks for at in sums[0].after} == {frozenset({0}), frozenset({1})}
    assert sums[0].lag_s == 0.0


def test_part_of_a_core_is_what_was_measured_of_a_link():
    link = Link(0.0, 1e8, core_s=1e-3, core_bytes_per_s=4e8)
    host = Host("h", "d", 2, cores=2)
    cluster = Cluster((DeviceKind("d", 1, (), 1.0),), (host,), link)
    assert share_of(step(1.0, 0.1), cluster) == pytest.approx(0.01 + 0.25)
    assert share_of(step(1.0, 0.0), cluster) == 0.0
