"""Links: the fit finds what payloads were made of, and a link of this host can be simulated."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, Link
from penstock.gauge.links import (
    PAYLOADS,
    SIZES,
    Overlapped,
    Probe,
    Timing,
    compare,
    fit,
    probe,
    probe_here,
    probe_of,
)
from tests.transport.transport_ranks import run_gloo, values

QUIET = Overlapped(1.0, 1.0, 1.0, 2.0, 2.0, 0.0)
amounts = st.floats(1e-6, 1e-2)
rates = st.floats(1e6, 1e11)


def timings_of(link: Link, sizes=SIZES) -> list[Timing]:
    """Return what payloads take on a link, without any noise."""
    rows: list[Timing] = []
    for size in sizes:
        low_s = 2 * link.end_s(size) + link.latency_s + size / link.bytes_per_s
        rows.append(Timing(size, low_s, 2 * low_s, 9 * low_s, link.end_s(size)))
    return rows


@given(amounts, rates, amounts, rates)
def test_fit_finds_the_link_that_payloads_were_made_of(latency_s, wire, overhead_s, copy):
    made = Link(latency_s, wire, overhead_s, copy)
    found = fit(timings_of(made))
    for size in SIZES:
        whole = made.latency_s + size / made.bytes_per_s
        assert found.latency_s + size / found.bytes_per_s == pytest.approx(
            whole, rel=1e-3, abs=1e-6 * (overhead_s + size / copy) + 1e-12
        )
        assert found.end_s(size) == pytest.approx(made.end_s(size), rel=1e-6)


@given(st.integers(1, len(SIZES) - 1), st.floats(0.5, 1.5))
def test_one_payload_that_is_off_moves_the_rate_less_than_it_is_off(at, factor):
    made = Link(1e-3, 25e6)
    timings = timings_of(made)
    timings[at] = timings[at]._replace(low_s=timings[at].low_s * factor)
    off = fit(timings).bytes_per_s / made.bytes_per_s
    assert min(1, 1 / factor) * 0.999 <= off <= max(1, 1 / factor) * 1.001


def test_fit_of_noise_is_still_a_link():
    rows = [Timing(size, 1e-5, 1e-5, 1e-5, 2e-5) for size in SIZES]
    assert fit(rows) == Link(0.0, math.inf, 2e-5, math.inf)


def test_line_needs_two_sizes():
    with pytest.raises(ValueError, match="two sizes"):
        fit(timings_of(Link(1e-3, 1e6), sizes=(64,)))


def test_slowdown_is_what_computes_beside_messages_take_longer_unless_that_is_noise():
    assert QUIET._replace(beside_s=1.25).slowdown == 0.25
    assert QUIET._replace(beside_s=1.25, noise=0.2).slowdown == 0.0
    assert QUIET._replace(beside_s=1.005).slowdown == 0.0
    assert QUIET._replace(beside_s=0.5).slowdown == 0.0


def test_link_with_a_wire_has_the_slowdown_and_shared_memory_has_none():
    timings = tuple(timings_of(Link(1e-3, 1e8, 1e-5, 1e10)))
    slower = QUIET._replace(beside_s=1.5)
    wired = Probe(timings, slower).link
    assert (wired.slowdown, wired.bytes_per_s) == (0.5, pytest.approx(1e8))
    shared = Probe(timings, slower, has_wire=False).link
    assert (shared.slowdown, shared.bytes_per_s) == (0.0, pytest.approx(1e10 / 2))


def test_two_processes_of_this_host_are_measured_and_what_comes_out_can_be_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "penstock.gauge.links._SLOW_S", math.inf
    )  # on a machine in use, too, all sizes are
    found = probe_here()
    assert not found.has_wire
    assert [timing.size_bytes for timing in found.timings] == list(SIZES)
    for timing in found.timings:
        assert 0 < timing.low_s <= timing.median_s <= timing.high_s < 10
        assert 0 < timing.end_s < 1
    assert min(found.overlap[:5]) > 0
    assert found.to_json()["link"]["overhead_s"] == found.link.overhead_s
    cluster = replace(Cluster.here(2), inside=found.link)
    cluster.save(tmp_path / "cluster.toml")
    assert Cluster.load(tmp_path / "cluster.toml") == cluster


def test_ranks_that_are_not_of_the_pair_wait_and_measure_nothing(hasty):
    def body(end):
        return [compare(end, (0, 2)), probe(end, (2, 1)), compare(end, (1, 2))]

    told = values(run_gloo(3, body))
    assert [[found is None for found in row] for row in told] == [
        [False, True, True],
        [True, False, False],
        [False, False, False],
    ]
    seconds = told[0][0]
    assert len(seconds) == len(PAYLOADS)
    assert all(0 < each < 10 for each in seconds)
    assert probe_of(told[2][1]).has_wire
