"""Orders of hosts: what is tried, and what renumbering keeps."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, HostPair, Link
from penstock.cluster.order import host_orders, placed
from penstock.errors import ClusterError

KINDS = tuple(DeviceKind(name, 1, (), 1.0) for name in "ab")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    count = draw(st.integers(1, 5))
    hosts = tuple(
        Host(
            f"h{k}",
            draw(st.sampled_from("ab")),
            draw(st.integers(1, 3)),
            draw(st.sampled_from("ew")),
        )
        for k in range(count)
    )
    link = Link(0.0, 1.0)
    return Cluster(KINDS, hosts, link, link, link)


def groups(cluster: Cluster) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for host in cluster.hosts:
        found.setdefault((host.device, host.region), []).append(host.name)
    return found


@given(clusters())
def test_orders_are_of_all_hosts_each_once_that_of_the_cluster_first(cluster: Cluster) -> None:
    names = tuple(host.name for host in cluster.hosts)
    orders = host_orders(cluster)
    assert orders[0] == names
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == sorted(names) for order in orders)


@given(clusters())
def test_every_order_of_the_groups_is_tried_with_alike_hosts_together(cluster: Cluster) -> None:
    alike = groups(cluster)
    wanted = {
        tuple(itertools.chain.from_iterable(order))
        for order in itertools.permutations(alike.values())
    }
    if len(alike) > 1:
        assert wanted <= set(host_orders(cluster))
    else:
        assert len(host_orders(cluster)) == 1


def test_groups_of_several_hosts_are_also_tried_in_turn() -> None:
    hosts = tuple(Host(f"{kind}{k}", kind, 1) for kind in "ab" for k in range(2))
    orders = host_orders(Cluster(KINDS, hosts, *(Link(0.0, 1.0),) * 3))
    assert ("a0", "b0", "a1", "b1") in orders
    assert ("b0", "a0", "b1", "a1") in orders
    assert len(orders) == 4


def test_more_than_four_groups_are_tried_as_they_are_and_reversed() -> None:
    hosts = tuple(Host(f"h{k}", "a", 1, f"region {k}") for k in range(5))
    orders = host_orders(Cluster(KINDS, hosts, *(Link(0.0, 1.0),) * 3))
    names = tuple(f"h{k}" for k in range(5))
    assert orders == (names, names[::-1])


@given(clusters(), st.data())
def test_placed_hosts_stand_first_and_the_others_follow_as_they_were(
    cluster: Cluster, data: st.DataObject
) -> None:
    names = [host.name for host in cluster.hosts]
    chosen = data.draw(st.permutations(names))[: data.draw(st.integers(0, len(names)))]
    there = placed(cluster, chosen)
    rest = [name for name in names if name not in chosen]
    assert [host.name for host in there.hosts] == [*chosen, *rest]
    assert set(there.hosts) == set(cluster.hosts)
    assert there.num_ranks == cluster.num_ranks
    assert there.across == cluster.across


@pytest.mark.parametrize("names", [("h0", "h9"), ("h0", "h0")])
def test_host_that_is_not_there_or_named_twice_is_refused(names: tuple[str, str]) -> None:
    cluster = Cluster(KINDS, (Host("h0", "a", 1), Host("h1", "b", 1)), *(Link(0.0, 1.0),) * 3)
    with pytest.raises(ClusterError, match=f'"{names[1]}"') as caught:
        placed(cluster, names)
    assert "h0, h1" in caught.value.hint


def test_hosts_named_for_each_rank_have_them_by_turns() -> None:
    gpu = DeviceKind("gpu", 100, (), 1.0)
    hosts = Host("a", "gpu", 2, memory_bytes=(10, 20)), Host("b", "gpu", 2), Host("c", "gpu", 1)
    cluster = Cluster((gpu,), hosts, Link(1e-6, 1e9), Link(1e-3, 1e6))
    dealt = placed(cluster, ("b", "a", "b", "a"))
    assert [dealt.host_of(rank).name for rank in range(5)] == ["b", "a", "b", "a", "c"]
    assert [dealt.memory_of(rank) for rank in range(5)] == [100, 10, 100, 20, 100]
    assert dealt.ranks_on(hosts[0]) == (1, 3)
    assert dealt.link(0, 2) is cluster.inside
    assert dealt.link(0, 1) is cluster.between
    assert dealt.within(15).memory_of(3) == 15
    assert "ranks 1, 3 on gpu" in str(dealt)
    assert placed(dealt, ("b", "a", "b", "a")) == dealt
    assert placed(dealt, ("a",)) == placed(cluster, ("a", "b", "c"))
    with pytest.raises(ClusterError, match='hosts are a, a, a: "a"'):
        placed(cluster, ("a", "a", "a"))


def test_hosts_with_links_of_their_own_are_tried_in_every_order_or_by_their_cuts() -> None:
    """Five or more: cut in two again and again where the fewest bytes per second cross."""
    for count in (3, 6):
        hosts = tuple(Host(f"h{k}", "ab"[k // 3], 1) for k in range(count))
        pairs = tuple(
            HostPair(f"h{a}", f"h{b}", 0.0, 9.0 if (a - b) % 2 == 0 else 1.0)
            for a, b in itertools.combinations(range(count), 2)
        )
        orders = host_orders(Cluster(KINDS, hosts, pairs=pairs))
        if count == 3:
            assert len(orders) == 6
            continue
        for found in ("024135", "241350", "024135"[::-1]):
            assert (tuple(f"h{k}" for k in found) in orders) == (found != "241350")
        assert tuple(f"h{k}" for k in "021435") in orders  # and with like devices together
