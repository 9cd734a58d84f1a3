"""Where memory is short, replicas divide their stages: as much on each rank as it has room for."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import PlanError
from penstock.search import Fixed, evaluate
from penstock.search.search import search
from penstock.search.sharded import shared_out
from tests.search.chains import chain, profile_of, with_costs

GRAPH = chain([4_000] * 6, [40] * 6)  # weights are what is held
PROFILE = with_costs(profile_of(GRAPH, [0.25] * 6), state_bytes_per_byte=2.0)
FAST = Link(1e-6, 1e8)


@given(st.lists(st.floats(0, 1.2), min_size=1, max_size=5))
def test_parts_are_as_equal_as_memory_allows(most):
    parts, grain = shared_out(most), 1000
    assert sum(parts) == grain
    if sum(most) > 1 + len(most) / grain:
        assert all(part <= grain * limit + 1e-6 for part, limit in zip(parts, most, strict=True))
        below = [p for p, limit in zip(parts, most, strict=True) if p + 1 < grain * limit]
        assert max(parts) <= min(below, default=grain) + len(most)


def cluster_of(rooms, slower=1):
    """Return hosts of one device each, the second one `slower`, which hold so many bytes."""
    names = "ab"[: len({1, slower})]
    kinds = tuple(DeviceKind(name, 10**6, (), 1.0) for name in names)
    hosts = tuple(Host(f"h{k}", names[min(k, len(names) - 1)], 1) for k in range(2))
    return Cluster(kinds, hosts, FAST, FAST, FAST).within(rooms)


def profiles_of(slower):
    own = replace(PROFILE, kind="a")
    slow = replace(own, op_s=tuple(slower * s for s in own.op_s), kind="b")
    return (own,) if slower == 1 else (own, slow)


FIXED = Fixed(ranks=2, replicas=2)


@pytest.mark.parametrize("rooms", [(90_000, 50_000), (45_000, 90_000), (70_000, 70_000)])
@pytest.mark.sampled(2)
def test_a_rank_keeps_no_more_than_it_has_room_for(rooms):
    cluster = cluster_of(rooms)
    plan = search(GRAPH, profiles_of(1), cluster, micro_batches=6, fixed=FIXED).plan
    assert plan.shards
    assert plan.predicted is not None
    assert all(p <= room for p, room in zip(plan.predicted.peak_bytes, rooms, strict=True))
    assert bool(plan.place.parts) == (len({*rooms}) > 1)
    if plan.place.parts:
        small = rooms.index(min(rooms))
        (why,) = [each.why for each in plan.decisions if each.what == "parts"]
        assert f"in equal parts rank {small} would hold" in why
        assert plan.place.parts[small] < plan.place.parts[1 - small]
        equal, _ = evaluate(GRAPH, profiles_of(1), cluster, plan.changed(parts=()))
        assert equal.peak_bytes[small] > rooms[small]


def test_shares_go_by_speed_and_parts_by_memory():
    """The slow rank, with the larger memory, takes fewer micro-batches and keeps more."""
    rooms = (50_000, 110_000)
    plan = search(GRAPH, profiles_of(2), cluster_of(rooms, 2), micro_batches=6, fixed=FIXED).plan
    assert (plan.place.hosts or ("h0", "h1"), plan.place.shares) in (
        (("h0", "h1"), (4, 2)),
        (("h1", "h0"), (2, 4)),
    )
    fast = plan.place.hosts.index("h0") if plan.place.hosts else 0
    assert plan.place.parts[fast] < plan.place.parts[1 - fast]


def test_no_part_makes_room_where_there_is_none():
    with pytest.raises(PlanError, match="would hold"):
        search(GRAPH, profiles_of(1), cluster_of((20_000, 20_000)), micro_batches=6, fixed=FIXED)


@pytest.mark.parametrize("rooms", [(90_000, 50_000), (76_000, 56_000)])
@pytest.mark.sampled(2)
def test_the_largest_part_is_the_least_that_fits(rooms):
    """Of all parts in tenths that fit, none has a smaller largest one."""
    cluster = cluster_of(rooms)
    plan = search(GRAPH, profiles_of(1), cluster, micro_batches=6, fixed=FIXED).plan
    own = max(plan.place.parts) / sum(plan.place.parts) if plan.place.parts else 0.5
    for a, b in itertools.combinations_with_replacement(range(11), 2):
        for parts in ((a, b), (b, a)):
            if a + b == 10 and max(parts) / 10 < own - 0.002:
                other, _ = evaluate(GRAPH, profiles_of(1), cluster, plan.changed(parts=parts))
                fits = zip(other.peak_bytes, rooms, strict=True)
                assert not all(peak <= room for peak, room in fits)
