"""Held out: a trace in two, the second half replayed; what cannot be is told and left out."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import held_out
from penstock.fleet.market import Market, MarketPool, begin_of


@given(st.integers(0, 59))
def test_two_parts_of_a_market_are_all_of_it(at):
    times = np.arange(0.0, 60.0, 10.0)
    column = np.array([3.0, 2.0, 5.0, 0.0, 1.0, 4.0])[:, None]
    gone = np.maximum(0.0, -np.diff(column, axis=0, prepend=3.0))
    market = Market((MarketPool("zone"),), times, column, column, gone, 60.0)
    rest = held_out.rest_of(market, float(at))
    assert rest.until_s == 60 - at
    for second in range(60 - at):
        assert rest.machines[rest.row_at(second)] == market.machines[market.row_at(at + second)]
    if at % 10:
        assert rest.gone.sum() + begin_of(market, float(at)).gone.sum() == market.gone.sum()


@pytest.mark.long
def test_rows_of_a_folder_are_of_each_trace_and_policy(tmp_path, monkeypatch, capsys):
    up = [1 if k % 50 < 35 else 0 for k in range(800)]
    sampled = {"metadata": {"gap_seconds": 600}, "data": up}
    (tmp_path / "zone.json").write_text(json.dumps(sampled))
    (tmp_path / "short.csv").write_text("time_s,machines\n0,1\n60,1\n120,0\n")
    (tmp_path / "bad.csv").write_text("time_s,machines\n0,-1\n")
    (tmp_path / "README.md").write_text("no trace")
    monkeypatch.setattr("sys.argv", ["held_out", str(tmp_path), "--json", "--starts", "4"])
    held_out.main()
    rows = json.loads(capsys.readouterr().out)
    assert [row["trace"] for row in rows if "skipped" in row] == ["bad", "short"]
    ours = {row["policy"]: row for row in rows if row["trace"] == "zone"}
    assert tuple(ours) == held_out.NAMES
    assert ours["look_ahead"]["in_time"] == 1
    assert 1 <= ours["look_ahead"]["cost_ratio"] <= ours["greedy"]["cost_ratio"]
    assert "below 0" in held_out.words(rows)
