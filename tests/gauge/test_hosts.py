"""Hosts: who shares one, which pair is measured for a level, and the cluster that comes out."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.errors import RunError
from penstock.gauge import hosts
from penstock.gauge.benchmark import Benchmark, benchmark
from penstock.gauge.hosts import (
    Compared,
    Seat,
    cluster_of,
    homes_of,
    in_regions,
    measured_kinds,
    pairs_of,
    seat_here,
    survey,
    told_apart,
    uneven_pairs,
)
from penstock.transport.threads import thread_transports
from tests.transport.transport_ranks import run_gloo, values

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


def test_survey_of_far_hosts_puts_them_in_regions_and_slow_ones_in_a_kind_of_their_own(
    hasty, monkeypatch
):
    """Hosts 0 and 2 are near each other, so are 1 and 3, which compute half as fast."""

    def compared(transport, pair):
        transport.barrier()
        is_near = pair[0] % 2 == pair[1] % 2
        return [1e-4, 1e-3] if is_near else [1e-2, 1e-1]

    slow = Benchmark(2e-11, 2e-10, 1e-5)
    monkeypatch.setattr(hosts, "compare", compared)

    def body(end):
        own = slow if end.rank % 2 else Benchmark(1e-11, 1e-10, 5e-6)
        monkeypatch.setattr(hosts, "benchmark", lambda: own)  # each is a process
        found = survey(end, Seat(f"key {end.rank}", f"node{end.rank}", "here"))
        return str(found.cluster), found.near, [level for level, _ in found.probes]

    told = values(run_gloo(4, body))
    assert all(each == told[0] for each in told)
    words, near, levels = told[0]
    assert near == [[0, 2], [1, 3]]
    assert levels == ["between", "across"]
    assert "node0: ranks 0-0 on cpu, region-1" in words
    assert "node1: ranks 1-1 on cpu-2, region-2" in words
    assert "node3: ranks 3-3 on cpu-2, region-2" in words


def test_regions_that_are_named_stay_as_they_are():
    homes = ((0,), (1,), (2,))
    found = in_regions(seats_of([1, 1, 1], "aab"), homes, ((0,), (1, 2)))
    assert [seat.region for seat in found] == ["a", "a", "b"]
    unnamed = [seat._replace(region="here") for seat in found]
    told = in_regions(unnamed, homes, ((0,), (1, 2)))
    assert [seat.region for seat in told] == ["region-1", "region-2", "region-2"]
    assert in_regions(unnamed, homes, ((0, 1, 2),)) == unnamed


def test_hosts_that_take_longer_for_the_same_are_slower_devices():
    other = replace(KIND, memory_bytes=1)
    homes, kinds = ((0, 1), (2,), (3,)), [KIND, KIND, KIND, other]
    first, _, slower, alone = told_apart(homes, kinds, [1.0, 2.5, 9.0])
    assert (first, alone) == (KIND, other)
    assert slower.peak_flop_per_s("float32") == KIND.peak_flop_per_s("float32") / 2.5
    assert slower.memory_bytes_per_s == KIND.memory_bytes_per_s / 2.5
    assert told_apart(homes, kinds, [1.0, 1.2, 9.0]) == kinds


def test_pairs_far_from_their_level_have_links_of_their_own():
    cluster = cluster_of(((0,), (1,), (2,)), seats_of([1, 1, 1]), [KIND] * 3, {"between": LINK})
    rows = [
        Compared((0, 1), 1e-3, 11e-3),
        Compared((0, 2), 1e-3, 12e-3),
        Compared((1, 2), 4e-3, 60e-3),
    ]
    (pair,) = uneven_pairs(cluster, rows)
    assert (pair.source, pair.target) == ("node-2", "node-3")
    assert pair.latency_s == pytest.approx(4 * LINK.latency_s)
    assert pair.bytes_per_s == pytest.approx(LINK.bytes_per_s * 11 / 56)
    assert uneven_pairs(cluster, rows[:2]) == ()


def test_measured_kinds_have_the_median_of_their_hosts():
    seats = seats_of([1, 1, 1])
    cluster = cluster_of(homes_of(seats), seats, [KIND] * 3, {})
    rows = [Benchmark(each, 2 * each, 1e-6) for each in (1.04e-11, 1e-11, 9e-11)]
    (kind,) = measured_kinds(cluster, rows).devices
    assert kind.flop_per_s == (("float32", 9.6e10),)
    assert kind.memory_bytes_per_s == 4.8e10


def test_benchmark_is_of_this_world(monkeypatch):
    monkeypatch.setattr("penstock.gauge.benchmark._ROUNDS", 1)
    found = benchmark()
    assert 1e-14 < found.flop_s < 1e-7
    assert 1e-13 < found.byte_s < 1e-6
    assert found.seconds == 4e9 * found.flop_s + 1e9 * found.byte_s + 1000 * found.call_s
