"""Hosts: who shares one, which pair is measured for a level, and the cluster that comes out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.errors import RunError
from penstock.runtime.hosts import (
    Compared,
    Seat,
    cluster_of,
    homes_of,
    pairs_of,
    seat_here,
    survey,
)
from penstock.runtime.transport.threads import thread_transports
from tests.runtime.transport_ranks import run_gloo, values

counts = st.lists(st.integers(1, 4), min_size=1, max_size=5)
KIND = Cluster.here(1).devices[0]
LINK = Link(1e-3, 1e8)


def seats_of(homes: list[int], regions: str = "") -> list[Seat]:
    """Return the seats of so many ranks on each host; regions by letter, or one."""
    named = regions or "a" * len(homes)
    return [
        Seat(f"key {h}", "node", named[h]) for h, count in enumerate(homes) for _ in range(count)
    ]


@given(counts)
def test_every_rank_is_at_home_once_and_in_order(homes):
    found = homes_of(seats_of(homes))
    assert [rank for home in found for rank in home] == list(range(sum(homes)))
    assert [len(home) for home in found] == homes


@given(counts)
def test_cluster_has_every_rank_on_its_host_and_names_of_its_own(homes):
    seats = seats_of(homes)
    found = homes_of(seats)
    kinds = [replace(KIND, memory_bytes=1 + homes[h]) for h, home in enumerate(found) for _ in home]
    cluster = cluster_of(found, seats, kinds, {"inside": LINK, "between": LINK})
    assert cluster.num_ranks == sum(homes)
    assert len({host.name for host in cluster.hosts}) == len(homes)
    assert len(cluster.devices) == len(set(homes))
    for rank, kind in enumerate(kinds):
        assert cluster.device_of(rank).memory_bytes == kind.memory_bytes


def test_hosts_of_one_name_are_numbered():
    seats = seats_of([1, 1, 1])
    cluster = cluster_of(homes_of(seats), seats, [KIND] * 3, {})
    assert [host.name for host in cluster.hosts] == ["node", "node-2", "node-3"]


def test_level_is_measured_where_the_middle_pair_of_hosts_stands():
    seats = seats_of([1, 2, 2, 1], "aaab")
    homes = homes_of(seats)
    times = {(0, 1): 1.0, (0, 2): 3.0, (1, 2): 2.0, (0, 3): 9.0, (1, 3): 7.0, (2, 3): 8.0}
    compared = [Compared(hosts, 0.1, large) for hosts, large in times.items()]
    assert pairs_of(homes, seats, compared) == [
        ("inside", (1, 2)),
        ("between", (1, 3)),
        ("across", (3, 5)),
    ]
    assert pairs_of(homes[:1], seats[:1], []) == []


def test_host_whose_ranks_are_not_neighbours_is_refused():
    a, b = Seat("a", "x", "here"), Seat("b", "y", "here")
    with pytest.raises(RunError, match="host x has the ranks 0, 2, not one after another") as said:
        homes_of([a, b, a])
    assert "one torchrun" in said.value.hint


def test_host_in_two_regions_is_refused():
    with pytest.raises(RunError, match="host x is in the regions east, west"):
        homes_of([Seat("a", "x", "west"), Seat("a", "x", "east")])


def test_survey_of_one_rank_is_a_cluster_without_links():
    (end,) = thread_transports(1)
    found = survey(end, seat_here("node", "here"))
    assert (found.compared, found.probes) == ((), ())
    assert found.cluster.hosts[0].name == "node"
    assert found.cluster.num_ranks == 1


def test_every_rank_gets_the_same_survey_with_the_links_that_there_are(hasty):
    def body(end):
        seat = Seat(f"key {end.rank // 2}", f"node{end.rank // 2}", "here")
        found = survey(end, seat)
        cluster = found.cluster
        levels = [level for level, _ in found.probes]
        return [str(cluster), levels, [each.hosts for each in found.compared]]

    told = values(run_gloo(3, body))
    assert told[0] == told[1] == told[2]
    assert told[0][1:] == [["inside", "between"], [[0, 1]]]
    assert "node0: ranks 0-1 on cpu" in told[0][0]
