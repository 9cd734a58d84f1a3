"""search.regions: planted regions are found again; the order crosses as few as can be."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.search.choices.regions import Probes, Regions, pipeline_order, regions

SMALL, LARGE = 64, 10**7


def probes_of(latency_s, bytes_per_s, noise=None):
    """Return what probing links of these latencies and rates [a][b] would time."""
    count = len(latency_s)
    rows = []
    for size in (SMALL, LARGE):
        row = [
            [0.0 if a == b else latency_s[a][b] + size / bytes_per_s[a][b] for b in range(count)]
            for a in range(count)
        ]
        if noise is not None:
            row = [[seconds * noise() for seconds in each] for each in row]
        rows.append(tuple(map(tuple, row)))
    return Probes(SMALL, LARGE, *rows)


def planted(region, noise=None, inside=(1e-5, 1e10), across=(0.03, 2e8)):
    """Return probes of devices whose regions are given."""

    def rows(at):
        return [[inside[at] if a == b else across[at] for b in region] for a in region]

    return probes_of(rows(0), rows(1), noise)


def numbered(region):
    """Return the same regions, numbered as they come."""
    numbers = {each: at for at, each in enumerate(dict.fromkeys(region))}
    return tuple(numbers[each] for each in region)


def matrix(draw, count, seconds):
    return [[0.0 if a == b else draw(seconds) for b in range(count)] for a in range(count)]


plants = st.lists(st.integers(0, 3), min_size=3, max_size=10).filter(
    lambda found: 1 < len(set(found)) < len(found)
)


@settings(deadline=None)
@given(plants, st.randoms(use_true_random=False))
def test_planted_regions_are_found_under_noise(region, random):
    """Every probe up to a half slower than its link; across is 36 times farther than inside."""
    probes = planted(region, lambda: random.uniform(1.0, 1.5))
    found = regions(probes, [1.0] * len(region))
    assert found.region == numbered(region)
    assert set(found.kind) == {0}


@settings(deadline=None)
@given(plants, st.randoms(use_true_random=False))
def test_planted_kinds_are_found_under_noise(region, random):
    """Devices of a region are fast, or twice as slow; each up to 5 % off."""
    slow = [random.random() < 0.5 for _ in region]
    compute_s = [(1 + is_slow) * random.uniform(1, 1.05) for is_slow in slow]
    found = regions(planted(region), compute_s)
    for number in range(found.count):
        here = found.members(number)
        has_fast = not all(slow[at] for at in here)
        assert [found.kind[at] for at in here] == [int(slow[at] and has_fast) for at in here]


def test_latency_alone_makes_regions_of_small_messages():
    """The same rate everywhere: a large payload takes as long, a small one does not."""
    region = (0, 1, 0, 1, 1)
    probes = planted(region, inside=(1e-5, 1e7), across=(0.03, 1e7))
    assert regions(probes, [1.0] * 5).count == 1
    assert regions(probes, [1.0] * 5, message_bytes=100).region == region


def test_distances_that_do_not_jump_are_one_region():
    draw = random.Random(0)
    rows = [[draw.uniform(1, 2) for _ in range(6)] for _ in range(6)]
    probes = Probes(1, 2, tuple(map(tuple, rows)), tuple(map(tuple, rows)))
    assert regions(probes, [1.0] * 6).count == 1
    for count in (1, 2):
        few = planted(tuple(range(count)))
        assert regions(few, [1.0] * count).region == (0,) * count


def test_slower_way_is_the_distance():
    """Two regions that only one direction is slow between."""
    region = (0, 0, 1, 1)
    latency = [[1e-5 if a <= b else 0.03 for b in region] for a in region]
    probes = probes_of(latency, [[1e10] * 4] * 4)
    assert regions(probes, [1.0] * 4).region == region
    distance = probes.distance_s(0)
    assert distance[0, 2] == distance[2, 0] == pytest.approx(0.03)


@given(st.floats(0, 1), st.floats(1e6, 1e12))
def test_link_of_two_payloads_is_the_one_that_was_timed(latency_s, bytes_per_s):
    link = probes_of([[latency_s] * 2] * 2, [[bytes_per_s] * 2] * 2).link(0, 1)
    large_s = latency_s + LARGE / bytes_per_s
    assert link.latency_s + SMALL / link.bytes_per_s == pytest.approx(
        latency_s + SMALL / bytes_per_s, abs=1e-9
    )
    assert link.latency_s + LARGE / link.bytes_per_s == pytest.approx(large_s)


def test_link_of_a_large_payload_that_came_first_has_latency_alone():
    link = Probes(1, 9, ((0, 3.0), (3.0, 0)), ((0, 2.0), (2.0, 0))).link(0, 1)
    assert (link.latency_s, link.bytes_per_s) == (2.0, math.inf)


@st.composite
def placed(draw):
    count = draw(st.integers(1, 6))
    region = numbered(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    seconds = matrix(draw, count, st.integers(0, 9).map(float))
    rows = tuple(map(tuple, seconds))
    kinds = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return Probes(0, 1, rows, rows), Regions(region, tuple(kinds))


@settings(max_examples=80, deadline=None)
@given(placed())
def test_order_equals_brute_force(case):
    probes, found = case
    distance, region = probes.distance_s(1), found.region

    def slow(order):
        pairs = [(a, b) for a, b in itertools.pairwise(order) if region[a] != region[b]]
        return len(pairs), sum(distance[a, b] for a, b in pairs)

    best = min(map(slow, itertools.permutations(range(len(region)))))
    order = pipeline_order(probes, found)
    assert sorted(order.devices) == list(range(len(region)))
    assert slow(order.devices) == best == (len(order.slow_links), order.slow_s)
    pairs = list(itertools.pairwise(order.devices))
    places = [at for at, (a, b) in enumerate(pairs) if region[a] != region[b]]
    assert list(order.slow_links) == places


def test_devices_of_a_kind_stand_together_between_the_ends_of_a_region():
    region, kind = (0, 0, 0, 0, 0, 0, 1), (0, 1, 0, 1, 2, 2, 0)
    order = pipeline_order(planted(region), Regions(region, kind))
    devices = [at for at in order.devices if region[at] == 0]
    between = [kind[at] for at in devices[1:-1]]
    assert len(list(itertools.groupby(between))) == len(set(between))


def test_pipeline_is_cut_where_links_are_slow():
    """Three regions in a line, the middle one near both: it stands in the middle."""
    region = (0, 1, 2, 0, 1, 2)
    far = {(0, 1): 0.03, (1, 2): 0.04, (0, 2): 0.2}
    latency = [[1e-5 if a == b else far[min(a, b), max(a, b)] for b in region] for a in region]
    probes = probes_of(latency, [[1e9] * 6] * 6)
    found = regions(probes, [1.0] * 6, message_bytes=100)
    assert found.region == region
    order = pipeline_order(probes, found, message_bytes=100)
    assert [region[at] for at in order.devices] in ([0, 0, 1, 1, 2, 2], [2, 2, 1, 1, 0, 0])
    assert order.slow_links == (1, 3)
    assert order.slow_s == pytest.approx(0.07, rel=1e-3)
    assert str(order).count("||") == 2
    assert str(order).endswith(": 2 slow links, 70.0 ms a message")


def test_twelve_regions_of_four_are_ordered():
    draw = np.random.default_rng(0)
    region = tuple(at % 12 for at in range(48))
    far = draw.uniform(0.01, 0.05, (12, 12))
    latency = [[1e-5 if a == b else far[a, b] for b in region] for a in region]
    probes = probes_of(latency, [[1e9] * 48] * 48)
    order = pipeline_order(probes, Regions(region, (0,) * 48))
    assert len(order.slow_links) == 11


def test_regions_print_their_devices_kind_by_kind():
    assert str(Regions((0, 0, 1, 0), (0, 1, 0, 0))) == "region 0: 0 3 | 1\nregion 1: 2"


def test_what_cannot_be_is_refused():
    square = ((0.0, 1.0), (1.0, 0.0))
    with pytest.raises(PlanError, match="payloads of 5 and 5"):
        Probes(5, 5, square, square)
    with pytest.raises(PlanError, match="large_s has rows of"):
        Probes(1, 2, square, ((0.0, 1.0),))
    with pytest.raises(PlanError, match="small_s from 0 to 1 is -1"):
        Probes(1, 2, ((0.0, -1.0), (1.0, 0.0)), square)
    probes = Probes(1, 2, square, square)
    with pytest.raises(PlanError, match="compute_s of 1 devices, probes of 2"):
        regions(probes, [1.0])
    with pytest.raises(PlanError, match="compute_s of 2"):
        regions(probes, [1.0, 0.0])
    with pytest.raises(PlanError, match=r"isolated is 0\.5"):
        regions(probes, [1.0, 1.0], isolated=0.5)
    with pytest.raises(PlanError, match="13 regions"):
        pipeline_order(planted(range(13)), Regions(tuple(range(13)), (0,) * 13))
