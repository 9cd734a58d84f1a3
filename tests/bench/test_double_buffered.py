"""bench.double_buffered gives what its docstring says."""

import dataclasses

import pytest

from bench.double_buffered import (
    SIMULATED,
    Stage,
    World,
    row_of,
    rows_of,
    show,
    simulated,
    window_of,
)
from bench.measure import Turns
from penstock.cluster import Cluster, Link
from tests.bench.test_models import MINI

KEYS = {
    "stages", "micro_batches", "flush_samples_per_s", "double_buffered_samples_per_s",
    "gain", "ideal_gain", "share", "simulated",
}  # fmt: skip
FREE = dataclasses.replace(Cluster.here(2), inside=Link(0.0, float("inf")))


@pytest.mark.long
def test_bench_measures_two_ranks_and_simulates_more(capsys):
    rows = rows_of(
        MINI, "double_buffered", [50, 100], (2, 8), Turns(wanted=1, limit=1, block_s=0.0), show
    )
    measured, computed = rows[:2], rows[2:]
    assert [(r["stages"], r["micro_batches"]) for r in measured] == [(2, 50), (2, 100)]
    assert not any(row["simulated"] for row in measured)
    expected = [(s, k * s) for s in (2, 8) for k in (1, 2, 3, 4)]
    assert [(r["stages"], r["micro_batches"]) for r in computed] == expected
    assert all(row["simulated"] for row in computed)
    for row in rows:
        assert row.keys() >= KEYS
        assert row["gain"] == row["double_buffered_samples_per_s"] / row["flush_samples_per_s"]
        assert row["ideal_gain"] == 1 + (row["stages"] - 1) / row["micro_batches"]
        assert row["share"] == row["gain"] / row["ideal_gain"]
    assert len(capsys.readouterr().out.splitlines()) == len(rows)


@pytest.mark.parametrize("num_stages", SIMULATED)
@pytest.mark.parametrize("times", [1, 2, 4])
def test_filling_and_draining_is_a_fiftieth_of_a_window(num_stages, times):
    m = times * num_stages
    window = window_of(num_stages, m)
    assert (num_stages - 1) / (window * m) == pytest.approx(0.02, rel=0.15)


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [2, 8])
def test_equal_stages_and_free_links_reach_the_ideal_but_for_the_window(num_stages):
    world = World([Stage(1.0, 2.0, 0.0, 0.0)] * 2, FREE, message_bytes=0, micro_batch=3)
    for m in (num_stages, 3 * num_stages):
        row, window = simulated(world, "double_buffered", num_stages, m), window_of(num_stages, m)
        assert row["flush_samples_per_s"] == pytest.approx(3 * m / (3 * (m + num_stages - 1)))
        assert row["share"] == pytest.approx(1 / (1 + (num_stages - 1) / (window * m)))


def test_updates_and_copies_take_from_the_gain():
    free = World([Stage(1.0, 2.0, 0.0, 0.0)] * 2, FREE, 0, 1)
    update, copy = ([Stage(1.0, 2.0, *costs)] * 2 for costs in ((0.5, 0.0), (0.5, 0.5)))
    shares = [
        simulated(free._replace(stages=s), "double_buffered", 2, 4)["share"]
        for s in (free.stages, update, copy)
    ]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 3


def test_flush_is_the_faster_of_the_two():
    rates = {"double_buffered": 3.0, "gpipe": 2.0, "one_f_one_b": 1.5}
    row = row_of((2, 2), "double_buffered", rates, simulated=True)
    assert (row["flush_samples_per_s"], row["gain"]) == (2.0, 1.5)
    assert row["share"] == 1.0
