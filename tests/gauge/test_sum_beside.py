"""Sums beside computes: a line through what they cost, a size held out, and two real ranks."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Link
from penstock.gauge import sum_beside
from penstock.gauge.sum_beside import (
    SumBeside,
    Tenths,
    measure_sums,
    predicted_s,
    sums_of,
    with_sums,
)
from tests.transport.transport_ranks import run_gloo, run_shared_memory, values

SIZES = (2**16, 2**18, 2**20, 2**22)
LINK = Link(1e-3, 1e8)
seconds = st.floats(1e-4, 1.0)
rates = st.floats(1e6, 1e12)


def exactly(seconds: float) -> Tenths:
    return Tenths(seconds, seconds, seconds)


def of_line(sizes, core, takes, longer: float = 1.5) -> list[SumBeside]:
    """Return sums that take a line of their size; of a core another one, but no more than it."""
    rows = []
    for size in sizes:
        taken_s = takes[0] + size / takes[1]
        computed_s, lost_s = longer * taken_s, min(taken_s, core[0] + size / core[1])
        ways = computed_s, taken_s, computed_s + taken_s, computed_s + lost_s
        rows.append(SumBeside(size, *map(exactly, ways), computed_s + lost_s))
    return rows


@given(seconds, rates, st.floats(0.01, 1.0))
def test_what_sums_cost_is_found_where_it_is_a_line(start_s, rate, part):
    found = with_sums(LINK, of_line(SIZES, (part * start_s, rate / part), (start_s, rate)))
    assert found.core_s == pytest.approx(part * start_s, rel=1e-4)
    for size in SIZES:
        wanted_s = part * (start_s + size / rate)
        assert found.sum_core_s(size) == pytest.approx(wanted_s, rel=1e-4)
    assert (found.latency_s, found.bytes_per_s) == (LINK.latency_s, LINK.bytes_per_s)


@given(st.sampled_from(SIZES), seconds, rates, st.floats(0.01, 1.0), st.floats(0.1, 3.0))
def test_a_size_held_out_is_as_the_others_say(size, start_s, rate, part, longer):
    """Computes lose a part of their core while the sum is under way, and then none."""
    rows = of_line(SIZES, (part * start_s, rate / part), (start_s, rate))
    computed_s = longer * (start_s + size / rate)
    wrong = SumBeside(size, exactly(computed_s), *[exactly(9.9)] * 3, 9.9)
    found = predicted_s([*(row for row in rows if row.size_bytes != size), wrong], wrong)
    taken_s = start_s + size / rate
    alone_s = computed_s + part * taken_s
    if computed_s < (1 - part) * taken_s:
        alone_s = computed_s / (1 - part)
    assert found == pytest.approx(max(taken_s, alone_s), rel=1e-3)


def test_noise_says_nothing_impossible():
    """At once in less than computes alone, or in more than one by one."""
    fast, slow = of_line(SIZES[:2], (1.0, 1e9), (0.5, 1e9))
    fast = SumBeside(fast.size_bytes, fast.compute, *[exactly(0.1)] * 3, beside_s=0.0)
    slow = SumBeside(slow.size_bytes, slow.compute, slow.sum, slow.one_by_one, exactly(9.0), 9.0)
    assert (fast.core_s, fast.slowdown) == (0.0, 0.0)
    assert slow.core_s == slow.sum.median_s
    found = with_sums(LINK, [fast, slow])
    assert found.core_s >= 0
    assert found.core_bytes_per_s > 0
    assert with_sums(LINK, [fast]) == LINK


def test_nothing_lost_is_not_taken_for_nothing_measured():
    free = of_line(SIZES, (0.0, float("inf")), (1e-3, 1e9))
    assert 0 < with_sums(LINK, free).sum_core_s(0) < 1e-6


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", [run_shared_memory, run_gloo])
def test_two_of_three_ranks_do_the_work_in_all_ways(run, monkeypatch):
    monkeypatch.setattr(sum_beside, "SIZES", (2**10, 2**12))
    monkeypatch.setattr(sum_beside, "_LEAST_S", 1e-4)
    monkeypatch.setattr(sum_beside, "_ROUNDS", (2, 2))
    monkeypatch.setattr(sum_beside, "_SWEPT_BYTES", 2**16)
    cores = os.sched_getaffinity(0)

    def body(end):
        return [measure_sums(end, (0, 2)), sorted(os.sched_getaffinity(0)) == sorted(cores)]

    told = values(run(3, body))
    assert told[1] == [None, True]
    for rank in 0, 2:
        assert told[rank][1]
        found = sums_of(told[rank][0])
        assert [one.size_bytes for one in found] == [2**10, 2**12]
        for one in found:
            for way in one.compute, one.sum, one.one_by_one, one.at_once:
                assert 0 < way.low_s <= way.median_s <= way.high_s
            assert 0 < one.beside_s <= 2 * one.at_once.high_s


def test_sums_that_are_slow_are_left_out(monkeypatch):
    monkeypatch.setattr(sum_beside, "_SLOW_S", 0.0)
    told = values(run_shared_memory(2, lambda end: measure_sums(end, (0, 1))))
    assert told == [[], []]
