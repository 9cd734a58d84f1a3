"""What a reader waits for a store, by a computed clock."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.stores import ONE_BY_ONE, Reach, StoreSpeed, long_run_s, measured_speed, waits_s
from penstock.stores.stored import Fetching
from tests.stores.slow_store import SlowStore, filled

parts = st.integers(1, 12)
sizes = st.sampled_from([1_000, 20_000, 300_000])
seconds = st.sampled_from([0.0, 0.001, 0.03, 0.2])
speeds = st.builds(StoreSpeed, st.sampled_from([1e-4, 0.01, 0.03]), st.sampled_from([1e6, 1e8]))
reaches = st.builds(Reach, st.integers(1, 40), st.sampled_from([1, 50_000, 10**7]))


@given(parts, sizes, seconds, speeds, reaches)
def test_in_the_long_run_it_is_the_closed_form(parts, size, compute_s, speed, reach):
    waits = waits_s([[size] * parts] * 400, compute_s, speed, reach)
    known_s = long_run_s(parts, size, compute_s, speed, reach)
    step_s = compute_s + known_s
    assert sum(waits[200:]) / 200 == pytest.approx(known_s, rel=0.02, abs=0.02 * step_s + 1e-9)


steps_of_parts = st.lists(st.lists(sizes, min_size=1, max_size=6), min_size=1, max_size=12)


@given(steps_of_parts, seconds, speeds, reaches)
def test_a_faster_store_never_waits_longer_nor_do_more_requests(steps, compute_s, speed, reach):
    whole_s = sum(waits_s(steps, compute_s, speed, reach))
    for faster, further in (
        (speed._replace(latency_s=speed.latency_s / 2), reach),
        (speed._replace(bytes_per_s=2 * speed.bytes_per_s), reach),
        (speed, reach._replace(requests=reach.requests + 3)),
        (speed, reach._replace(most_bytes=2 * reach.most_bytes + 10_000)),
    ):
        assert sum(waits_s(steps, compute_s, faster, further)) <= whole_s + 1e-9


@given(steps_of_parts, seconds, speeds, reaches)
def test_it_is_no_shorter_than_the_link_and_no_longer_than_one_by_one(
    steps, compute_s, speed, reach
):
    whole_s = sum(waits_s(steps, compute_s, speed, reach))
    total = sum(map(sum, steps))
    computes_s = compute_s * (len(steps) - 1)
    assert whole_s >= speed.latency_s + total / speed.bytes_per_s - computes_s - 1e-9
    slowest_s = sum(waits_s(steps, compute_s, speed, ONE_BY_ONE))
    count = sum(map(len, steps))
    assert slowest_s == pytest.approx(count * speed.latency_s + total / speed.bytes_per_s)
    assert whole_s <= slowest_s + 1e-9


def test_two_requests_by_hand():
    """Both begin at 0; the link carries the second behind the first; the third waits for a slot."""
    speed = StoreSpeed(1.0, 10.0)
    assert waits_s([[10], [10], [20]], 0.5, speed, Reach(2, 100)) == [2.0, 0.5, 1.5]


def test_the_speed_of_a_store_is_tried():
    url = filled({str(number): bytes(1_000_000) for number in range(8)})
    dataset = ps.stored(url)
    clock = [0.0]

    def answers(_: str) -> None:
        clock[0] += 0.25

    one = replace(dataset, fetching=Fetching(1, 1), _of_process={})  # so the clock is of one thread
    SlowStore.before = answers
    speed = measured_speed(one, lambda: clock[0])
    assert speed.latency_s == 0.25
    assert speed.bytes_per_s == float("inf"), "all that a part takes is latency"
