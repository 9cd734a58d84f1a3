"""What a step takes whose gradients a server takes as they come, beside sums by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.plan import plan_by_hand
from penstock.search.judge import Judge
from penstock.simulate.server_steps import STEPS, ServerSeconds, served_step_s
from penstock.sums import sums_way
from tests.search.chains import chain, cluster_of, profile_of


def alike(*seconds):
    return np.repeat(np.array(seconds, float)[:, None], STEPS, axis=1)


FREE = [ServerSeconds((0.0,) * 3, 0.0)]


@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.integers(1, 2))
def test_a_step_of_backup_workers_takes_what_the_slowest_that_count_take(seconds, left_out):
    """Behind a server that takes no time; a late rank begins again in the middle of a step."""
    found = served_step_s(sums_way(f"backup:{left_out}"), alike(*seconds), FREE)
    assert found <= sorted(seconds)[-1 - left_out] + 1e-9
    assert found >= min(seconds)


@given(st.lists(st.integers(1, 20), min_size=3, max_size=3), st.integers(0, 3))
def test_a_bound_brings_all_ranks_to_the_pace_of_the_slowest(seconds, bound):
    found = served_step_s(sums_way(f"ssp:{bound}"), alike(*seconds), FREE)
    free = served_step_s(sums_way("async"), alike(*seconds), FREE)
    assert free <= 1.02 * found
    assert found <= 1.02 * max(seconds)
    if bound == 0:
        assert found == pytest.approx(max(seconds), rel=0.05)


def test_without_a_bound_each_rank_has_its_own_pace():
    found = served_step_s(sums_way("async"), alike(1, 1, 4), FREE)
    assert found == pytest.approx(3 / (1 + 1 + 1 / 4), rel=0.05)


def test_what_a_server_does_it_does_one_after_the_other():
    """A gradient in, an update and weights out, of three ranks, are longer than a compute."""
    busy = [ServerSeconds((1.0,) * 3, 1.0)]
    found = served_step_s(sums_way("async"), alike(1, 1, 1), busy)
    assert found == pytest.approx(3 * 3, rel=0.02)


def test_two_servers_of_half_of_the_parameters_take_half_as_long():
    half = ServerSeconds((0.5,) * 3, 0.5)
    found = served_step_s(sums_way("async"), alike(1, 1, 1), [half, half])
    assert found == pytest.approx(3 * 3 / 2, rel=0.02)


def test_a_server_waits_for_what_the_first_one_has_decided():
    """But for a second, in which it gets gradients itself."""
    first = ServerSeconds((1.0,) * 3, 1.0)
    second = ServerSeconds((1.0,) * 3, 1.0, told_s=10.0)
    found = served_step_s(sums_way("ssp:0"), alike(1, 1, 1), [first, second])
    alone = served_step_s(sums_way("ssp:0"), alike(1, 1, 1), [first])
    assert found == pytest.approx(alone + 9)


def test_a_rank_that_is_late_now_and_then_costs_less_where_others_may_go_on():
    drawn = np.random.default_rng(1).random((3, STEPS)) < 1 / 8
    seconds = np.where(drawn, 4.0, 1.0)
    at_once = seconds.max(axis=0).mean()
    by_bound = [served_step_s(sums_way(f"ssp:{s}"), seconds, FREE) for s in (0, 1, 3, 8)]
    assert by_bound == sorted(by_bound, reverse=True)
    assert by_bound[0] == pytest.approx(at_once, rel=0.1)
    assert by_bound[2] < 0.9 * at_once
    assert served_step_s(sums_way("backup:1"), seconds, FREE) < 0.9 * at_once


def test_plans_are_predicted_by_it():
    graph = chain([10**6] * 2, [1] * 2)
    judge = Judge(graph, profile_of(graph, [0.01, 0.02]), cluster_of(2, link=Link(1e-3, 1e9)))
    sizes = {"num_micro_batches": 2, "replicas": 2, "num_ranks": 1}
    plan = plan_by_hand(graph, [], "gpipe", **sizes)
    own_s = judge.candidate(plan).step_s
    found = judge.candidate(plan.changed(sums="ssp:2"))
    way_s = 1e-3 + 2e6 / 1e9
    assert found.refused == ""
    assert own_s - 0.01 < found.step_s <= own_s + 2 * way_s


def test_a_plan_whose_ranks_do_not_wait_is_predicted_without_the_slow_one():
    graph = chain([10**3] * 2, [1] * 2)
    profile, slow = (profile_of(graph, [s, s]) for s in (0.01, 0.05))
    kinds = replace(profile, kind="quick"), replace(slow, kind="slow")
    devices = (DeviceKind(kind, 10**9, (), 1.0) for kind in ("quick", "slow"))
    link = Link(1e-6, 1e12)
    hosts = Host("x", "quick", 2), Host("y", "slow", 1)
    cluster = Cluster(tuple(devices), hosts, link, link, link)
    judge = Judge(graph, kinds, cluster)
    sizes = {"num_micro_batches": 2, "replicas": 3, "num_ranks": 1}
    plan = plan_by_hand(graph, [], "gpipe", **sizes)
    own_s, left_out_s = (
        judge.candidate(plan.changed(sums=sums)).step_s for sums in (None, "backup:1")
    )
    assert left_out_s < own_s / 2


def test_a_plan_of_two_servers_is_faster_where_a_line_is_slow():
    graph = chain([10**6] * 4, [1] * 4)
    judge = Judge(graph, profile_of(graph, [1e-4] * 4), cluster_of(4, link=Link(1e-6, 1e8)))
    sizes = {"num_micro_batches": 1, "replicas": 4, "num_ranks": 1}
    plan = plan_by_hand(graph, [], "gpipe", **sizes).changed(sums="async")
    one, two = (
        judge.candidate(plan.changed(topology=topology)).step_s for topology in (None, "server:2")
    )
    assert two < 0.6 * one
