"""search.sharding: equal to trying everything; its figures are those of the collectives."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.errors import ClusterError, PlanError
from penstock.search.choices.ring import alike, ring_of
from penstock.search.choices.sharding import Bucket, Way, best_sharding, ways_of

WIRE = Link(1.0, 2.0)
sizes = st.integers(0, 40)
seconds = st.sampled_from([0.0, 0.5, 5.0, 50.0])
wires = st.builds(Link, st.sampled_from([0.0, 1.0]), st.sampled_from([1.0, 4.0]))


def of_two_hosts(first: int, second: int, inside: Link, between: Link):
    hosts = (Host("a", "d", first), Host("b", "d", second))
    return ring_of(Cluster((DeviceKind("d", 1, (), 1.0),), hosts, inside, between))


counts = st.integers(1, 3)
rings = st.builds(alike, st.integers(1, 5), wires) | st.builds(
    of_two_hosts, counts, counts, wires, wires
)


def buckets(most):
    return st.lists(
        st.builds(Bucket, sizes, sizes, sizes, seconds, seconds), min_size=1, max_size=most
    )


def brute_force(given, ring, memory_bytes, slices, at_once):
    """Return the least seconds of all choices that fit, from the definition of both."""
    best = math.inf
    for ways in itertools.product(*(ways_of(each, ring, slices=slices) for each in given)):
        held = sum(way.held_bytes for way in ways)
        if held + at_once * max(way.gathered_bytes for way in ways) <= memory_bytes:
            best = min(best, sum(way.seconds for way in ways))
    return best


def check(given, ring, memory_bytes, slices=(1,), at_once=1):
    expected = brute_force(given, ring, memory_bytes, slices, at_once)
    if expected == math.inf:
        with pytest.raises(PlanError, match="a rank on"):
            best_sharding(given, ring, memory_bytes, slices=slices, at_once=at_once)
        return
    found = best_sharding(given, ring, memory_bytes, slices=slices, at_once=at_once)
    assert found.seconds == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert found.bound_s <= found.seconds
    assert found.bound_s == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert found.peak_bytes <= memory_bytes
    for way, bucket in zip(found.ways, given, strict=True):
        assert way in ways_of(bucket, ring, slices=slices)
    held = sum(way.held_bytes for way in found.ways)
    assert found.peak_bytes == held + at_once * max(way.gathered_bytes for way in found.ways)
    assert found.seconds == pytest.approx(sum(way.seconds for way in found.ways))


@settings(max_examples=120, deadline=None)
@given(buckets(4), rings, st.floats(0, 1), st.sampled_from([(1,), (1, 2), (4,)]), st.integers(1, 2))
def test_choice_equals_brute_force(given, ring, part, slices, at_once):
    whole = sum(each.weight_bytes + each.gradient_bytes + each.optimizer_bytes for each in given)
    check(given, ring, int(whole * part), slices, at_once)


@settings(max_examples=60, deadline=None)
@given(buckets(6), rings, st.floats(0, 1))
def test_choice_of_more_buckets_equals_brute_force(given, ring, part):
    whole = sum(each.weight_bytes + each.gradient_bytes + each.optimizer_bytes for each in given)
    check(given, ring, int(whole * part))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("same", [False, True])
def test_choice_of_ten_buckets_equals_brute_force(seed, same):
    draw = random.Random(seed)
    given = []
    for _ in range(10):
        size = draw.randrange(10**5, 10**7)
        hidden = (0.0, 0.0) if same else (draw.uniform(0, 2), draw.uniform(0, 4))
        given.append(Bucket(size, size, 2 * size, *hidden))
    whole = sum(4 * each.weight_bytes for each in given)
    for part in (0.3, 0.4):
        check(given, alike(4, Link(1e-3, 1e7)), int(whole * part))


@pytest.mark.parametrize("latency_s", [0.0, 30e-6])
def test_five_hundred_buckets_are_proved_to_a_ten_thousandth(latency_s):
    draw = random.Random(7)
    sizes = [draw.randrange(1 << 16, 1 << 26) for _ in range(500)]
    given = [Bucket(size, size, 2 * size) for size in sizes]
    ring = alike(8, Link(latency_s, 1e10))
    found = best_sharding(given, ring, int(1.2 * sum(sizes)), slices=(1, 4))
    assert found.peak_bytes <= found.memory_bytes
    assert found.bound_s >= found.seconds * (1 - 1e-4)


def test_seconds_of_each_way_are_those_of_its_collectives():
    """n = 4, W = 8, G = 16: half a ring of W takes 3 (1 + 2 / 2), of G 3 (1 + 4 / 2)."""
    replicate, keep, shard = ways_of(Bucket(8, 16, 24), alike(4, WIRE))
    assert (replicate.seconds, keep.seconds, shard.seconds) == (18, 6 + 9, 6 + 6 + 9)
    assert (replicate.held_bytes, keep.held_bytes, shard.held_bytes) == (48, 8 + 12, 12)
    assert (replicate.gathered_bytes, keep.gathered_bytes, shard.gathered_bytes) == (0, 16, 24)


def test_sharded_bytes_are_three_halves_of_those_replicated():
    """Without latency: 3 (n - 1) / n S against 2 (n - 1) / n S."""
    replicate, keep, shard = ways_of(Bucket(120, 120), alike(5, Link(0, 1)))
    assert replicate.seconds == keep.seconds == pytest.approx(2 * 4 / 5 * 120)
    assert shard.seconds == pytest.approx(3 * 4 / 5 * 120)


def test_passes_hide_what_is_sent_in_them():
    """Gathers of 6 s, a scatter of 9: forward hides the one in it, backward the rest."""
    ring = alike(4, WIRE)
    replicate, keep, shard = ways_of(Bucket(8, 16, 0, 4.0, 10.0), ring)
    assert (replicate.seconds, keep.seconds, shard.seconds) == (8, 2, 2 + 5)
    replicate, keep, shard = ways_of(Bucket(8, 16, 0, 99.0, 7.0), ring)
    assert (replicate.seconds, keep.seconds, shard.seconds) == (11, 2, 8)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 9))
def test_slices_gather_their_part_at_once(weights, gradients, count):
    *_, shard = ways_of(Bucket(weights, gradients), alike(3, WIRE), slices=(count,))
    assert shard.gathered_bytes == math.ceil(weights / count) + math.ceil(gradients / count)


def test_slices_pay_the_latency_again():
    bucket, ring = Bucket(8, 8), alike(3, WIRE)
    _, _, whole = ways_of(bucket, ring)
    _, _, sliced = ways_of(bucket, ring, slices=(4,))
    assert sliced.seconds - whole.seconds == pytest.approx(3 * 2 * 3 * WIRE.latency_s)


def test_slices_make_room():
    """Two ranks: held 24 in parts; gathered 24 do not fit, 6 do."""
    given, ring = [Bucket(12, 12, 24)], alike(2, WIRE)
    with pytest.raises(PlanError, match="need 48 B a rank on 2 ranks; there are 30 B"):
        best_sharding(given, ring, 30, slices=(1,))
    found = best_sharding(given, ring, 30, slices=(1, 4))
    assert (found.ways[0].how, found.ways[0].slices, found.peak_bytes) == ("shard", 4, 30)


def test_two_gathered_at_once_need_twice_the_room():
    """Gathered once it holds 36 and gathers 12; whole it holds 48 and is slower."""
    given, ring = [Bucket(12, 12, 24, forward_s=9.0)], alike(2, WIRE)
    once = best_sharding(given, ring, 50, at_once=1)
    twice = best_sharding(given, ring, 50, at_once=2)
    assert (once.ways[0].how, once.peak_bytes) == ("shard_keep", 48)
    assert (twice.ways[0].how, twice.peak_bytes) == ("replicate", 48)


def test_every_bucket_goes_its_fastest_way_where_memory_is_not_short():
    """Forward hides the gathers of the first two; of the third backward hides the whole sum."""
    given = [Bucket(8, 8, 8, 9.0)] * 2 + [Bucket(8, 8, 8, 0.0, 99.0)]
    found = best_sharding(given, alike(4, WIRE), 10**6)
    assert [way.how for way in found.ways] == ["shard_keep", "shard_keep", "replicate"]
    assert found.s_per_byte == 0
    assert set(found.reasons) == {"nothing is faster"}
    assert "memory is not short" in str(found)


def test_price_of_memory_is_that_of_the_relaxed_choice():
    """As scipy's, with what is largest as it is; and what a bucket pays is said."""
    given = [Bucket(10 * k, 10 * k, 20 * k) for k in range(1, 7)]
    ring = alike(4, Link(0.1, 1.0))
    found = best_sharding(given, ring, 400)
    largest = max(way.gathered_bytes for way in found.ways)
    every = [
        [way for way in ways_of(each, ring) if way.gathered_bytes <= largest] for each in given
    ]
    flat = [(row, way) for row, ways in enumerate(every) for way in ways]
    solved = linprog(
        [way.seconds for _, way in flat],
        A_ub=[[way.held_bytes for _, way in flat]],
        b_ub=[found.memory_bytes - largest],
        A_eq=[[float(row == k) for row, _ in flat] for k in range(len(given))],
        b_eq=[1.0] * len(given),
    )
    assert found.s_per_byte == pytest.approx(-solved.ineqlin.marginals[0])
    assert found.s_per_byte > 0
    slow = [way.how == "shard" for way in found.ways]
    assert any(slow)
    for is_slow, reason in zip(slow, found.reasons, strict=True):
        assert ("slower than" in reason) == is_slow


def test_reason_names_what_a_faster_way_needs():
    ring = alike(2, Link(0.0, 1.0))
    held = best_sharding([Bucket(8, 8, 8)] * 2, ring, 40).reasons
    assert "4.00 s slower than shard_keep, which would hold 8 B more" in held
    found = best_sharding([Bucket(8, 8, 0, 9.0, 0.0)], alike(2, Link(0.5, 1.0)), 15, slices=(1, 8))
    assert found.ways[0].slices == 8
    assert "which would gather" in found.reasons[0]


def test_ring_of_a_cluster_sums_as_long_as_the_cluster_says():
    kind = DeviceKind("d", 1, (), 1.0)
    hosts = (Host("a", "d", 2), Host("b", "d", 1), Host("c", "d", 1, "far"))
    inside, between, across = Link(1e-6, 1e9), Link(1e-5, 1e8), Link(1e-2, 1e7)
    cluster = Cluster((kind,), hosts, inside, between, across)
    for ranks in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [3, 1, 0], [0, 2, 1, 3]):
        for size in (0, 10**3, 10**8):
            ring = ring_of(cluster, ranks)
            told = cluster.all_reduce_s(size, ranks, algorithm="ring")
            assert ring.all_reduce_s(size) == pytest.approx(told)
            both = ring.all_gather_s(size) + ring.reduce_scatter_s(size)
            assert both == ring.all_reduce_s(size)
    assert ring_of(cluster).count == 4


def test_what_cannot_be_is_refused():
    with pytest.raises(PlanError, match="gradient_bytes of a bucket is -1"):
        Bucket(1, -1)
    with pytest.raises(ClusterError, match="have no link"):
        ring_of(Cluster((DeviceKind("d", 1, (), 1.0),), (Host("a", "d", 2),)))
    for arguments in ({"slices": ()}, {"slices": (0,)}, {"at_once": 0}):
        with pytest.raises(PlanError, match="1 buckets"):
            best_sharding([Bucket(1, 1)], alike(1, WIRE), 9, **arguments)


def test_way_prints_its_figures():
    assert str(Way("shard", 2, 0.5, 2048, 512)) == (
        "shard in 2 slices: 500 ms, holds 2.00 KiB, gathers 512 B"
    )
