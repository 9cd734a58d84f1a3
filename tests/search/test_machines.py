"""transformer.machines: devices of a described cluster, and the constants they are given."""

import math
from dataclasses import replace

import pytest

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.errors import ClusterError, EstimateError
from penstock.estimate import load
from penstock.search.transformer.machines import constants_for, machines_of

FAST = DeviceKind("a100-80", 80, (("float32", 1e12), ("bfloat16", 312e12)), 2e12, 3.0)
SLOW = DeviceKind("t4", 16, (("float16", 65e12),), 0.3e12)
INSIDE, BETWEEN, ACROSS = Link(1e-5, 300e9), Link(1e-5, 100e9), Link(1e-3, 1e9)


def cluster(*hosts, **links):
    links = {"inside": INSIDE, "between": BETWEEN, "across": ACROSS, **links}
    return Cluster((FAST, SLOW), tuple(Host(*each) for each in hosts), **links)


def test_a_device_has_its_part_of_the_link_between_hosts():
    (pool,) = machines_of(cluster(("a", "a100-80", 4), ("b", "a100-80", 4))).pools
    device = pool.device
    assert (pool.count, pool.memory_bytes, pool.usd_per_hour) == (8, 80, 3.0)
    assert (device.name, device.peak_flop_per_s, device.bytes_per_s) == ("a100-80", 312e12, 2e12)
    assert (device.inside_bytes_per_s, device.across_bytes_per_s) == (300e9, 25e9)
    assert device.ranks_per_host == 4


def test_pairs_of_hosts_with_links_of_their_own_are_refused():
    there = cluster(("a", "t4", 1), ("b", "t4", 1), pairs=(HostPair("a", "b", 0.0, 1.0),))
    with pytest.raises(ClusterError, match="links of 1 pairs of hosts"):
        machines_of(there)


def test_every_kind_is_a_pool_and_the_slowest_level_parts_them():
    near = machines_of(cluster(("a", "a100-80", 4, "east"), ("b", "t4", 2, "east")))
    assert [(pool.device.name, pool.count) for pool in near.pools] == [("a100-80", 4), ("t4", 2)]
    assert near.between_bytes_per_s == BETWEEN.bytes_per_s
    assert near.pools[1].device.peak_flop_per_s == 65e12
    far = machines_of(cluster(("a", "a100-80", 4, "east"), ("b", "t4", 2, "west")))
    assert far.between_bytes_per_s == ACROSS.bytes_per_s


def test_links_that_nobody_needs_may_be_left_out():
    alone = machines_of(cluster(("a", "a100-80", 1), inside=None, between=None, across=None))
    assert alone.pools[0].device.inside_bytes_per_s == math.inf
    ones = machines_of(cluster(("a", "t4", 1), ("b", "t4", 1), inside=None))
    assert ones.pools[0].device.inside_bytes_per_s == BETWEEN.bytes_per_s


@pytest.mark.parametrize(
    ("there", "words"),
    [
        (cluster(("a", "t4", 2), inside=None), 'no link inside, and "t4" needs one'),
        (cluster(("a", "t4", 2), ("b", "t4", 2), between=None), "no link between"),
        (cluster(("a", "t4", 2, "x"), ("b", "a100-80", 2, "y"), across=None), "no link across"),
        (cluster(("a", "t4", 2), ("b", "t4", 3)), 'host "b" has 3 "t4", others 2'),
        (
            replace(cluster(("a", "t4", 2)), devices=(replace(SLOW, flop_per_s=()),)),
            "has no FLOP/s for bfloat16",
        ),
    ],
)
def test_what_does_not_do_for_an_estimate_is_refused(there, words):
    with pytest.raises(ClusterError, match=words):
        machines_of(there)


def test_constants_are_of_like_machines():
    few = machines_of(cluster(("a", "a100-80", 8))).pools
    slow = machines_of(cluster(("a", "t4", 8))).pools
    known = load()
    near, far = (constants_for("time", pools, known) for pools in (few, slow))
    assert "a100-80" in near.seen["device"]
    assert "a100-80" not in far.seen["device"]
    assert far.doubt["products"] > near.doubt["products"] > 0
    assert constants_for("time", few, known, cluster="vtrain") == known[0].of("vtrain")
    with pytest.raises(EstimateError, match="no constants of memory"):
        constants_for("memory", few, known[:1])
