"""Regions: planted ones are found again; the order of hosts and small differences do not matter."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.cluster.regions import _merges, alike, regions, regions_of, seconds_per_byte


@st.composite
def planted(draw):
    """Draw regions of hosts and a matrix: inside, bytes take up to 2.2 times as long as elsewhere;
    between them, at least 4 times as long as the longest inside, unlike by less than that.
    """
    sizes = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4).filter(lambda s: max(s) > 1))
    order = draw(st.permutations(range(sum(sizes))))
    groups, start = [], 0
    for size in sizes:
        groups.append(tuple(sorted(order[start : start + size])))
        start += size
    of = {host: number for number, group in enumerate(groups) for host in group}
    factors = st.floats(1.0, 1.5)
    base = [draw(factors) for _ in groups]
    count, scale = len(of), draw(st.floats(1e-12, 1e-3))
    apart = draw(st.floats(4 * 2.25, 1e4))
    found = np.zeros((count, count))
    for a, b in combinations(range(count), 2):
        is_inside = of[a] == of[b]
        long = base[of[a]] * draw(factors) if is_inside else apart * draw(st.floats(1.0, 2.0))
        found[a, b], found[b, a] = scale * long, scale * long * draw(st.floats(0.2, 1.0))
    return tuple(sorted(groups)), found


@given(planted())
def test_planted_regions_are_found_whatever_the_order_of_the_hosts(case):
    groups, apart = case
    assert regions(apart) == groups


@given(st.integers(1, 6), st.data())
def test_hosts_that_are_about_as_far_from_each_other_are_one_region(count, data):
    apart = np.ones((count, count))
    for a, b in combinations(range(count), 2):
        apart[a, b] = apart[b, a] = data.draw(st.floats(1.0, 2.9))
    assert regions(apart) == (tuple(range(count)),)


def test_of_two_levels_of_distance_the_greater_leap_counts():
    """Four hosts in two racks, 4 times as far; two more of which each is 100 times as far."""
    apart = np.full((6, 6), 100.0)
    for rack in ((0, 1), (2, 3)):
        apart[np.ix_(rack, (0, 1, 2, 3))] = apart[np.ix_((0, 1, 2, 3), rack)] = 4.0
    apart[0, 1] = apart[1, 0] = apart[2, 3] = apart[3, 2] = 1.0
    assert regions(apart) == ((0, 1, 2, 3), (4,), (5,))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.floats(1.05, 3.0))
def test_hosts_compute_alike_where_a_chain_of_near_ones_joins_them(seconds, unlike):
    groups = alike(seconds, unlike)
    assert sorted(host for group in groups for host in group) == list(range(len(seconds)))
    of = {host: number for number, group in enumerate(groups) for host in group}
    order = sorted(range(len(seconds)), key=lambda host: seconds[host])
    for a, b in pairwise(order):
        assert (of[a] == of[b]) == (seconds[b] <= unlike * seconds[a])


def test_capability_is_what_a_byte_takes_and_its_part_of_a_minimal_payload():
    assert math.isclose(seconds_per_byte(1e-8, 1e-3, 10**5), 2e-8)


def test_regions_of_a_cluster_are_those_of_its_links_not_of_its_names():
    kind = DeviceKind("d", 1, (), 1.0)
    hosts = tuple(Host(name, "d", 2) for name in "abcd")
    fast, slow = Link(1e-4, 1e9), (1e-2, 1e7)
    pairs = tuple(HostPair(a, b, *slow) for a in "ac" for b in "bd")
    cluster = Cluster((kind,), hosts, inside=fast, between=fast, pairs=pairs)
    assert regions_of(cluster) == ((0, 2), (1, 3))
    assert regions_of(Cluster((kind,), hosts, inside=fast, between=fast)) == ((0, 1, 2, 3),)


@given(st.integers(2, 12), st.integers(0, 10**6))
def test_groups_are_joined_as_scipy_joins_them(count, seed):
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy", reason="an extra: penstock[solvers]")
    pairs = [*combinations(range(count), 2)]
    row = np.random.default_rng(seed).normal(size=len(pairs))
    told = hierarchy.linkage(row - row.min(), "average")
    merges = _merges(count, dict(zip(pairs, row.tolist(), strict=True)))
    assert [(a, b) for a, b, _ in merges] == [(int(a), int(b)) for a, b, *_ in told]
    assert [height for *_, height in merges] == pytest.approx(told[:, 2].tolist())
