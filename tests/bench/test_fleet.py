"""The bench of policies: rows of a trace of one's own, and the row over all deadlines."""

import pytest

from bench import policies
from penstock.fleet import read_market


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "own.csv"
    rows = "".join(f"{hour},{6 if hour % 5 < 3 else 2 + hour % 2}\n" for hour in range(200))
    path.write_text("time_h,machines\n" + rows)
    return path


def test_job_runs_on_what_is_there_three_fifths_of_the_time(trace):
    market = read_market(trace)
    assert policies.wanted(market) == 6
    assert market.share_up(6)[0] == pytest.approx(0.6)


@pytest.mark.long
def test_rows_of_a_trace_miss_nothing_and_close_half_of_the_gap(trace, monkeypatch):
    monkeypatch.setattr(policies, "DEADLINES", (1.25,))
    monkeypatch.setattr(policies, "WORK", 60)
    monkeypatch.setattr(policies, "_OWN", 40)
    rows = policies.table([trace], 12, data=trace, told=lambda _: None)
    assert {row["trace"] for row in rows} == {f"own {kind}" for kind in policies.KINDS}
    assert {row["deadline"] for row in rows} == {1.25, "all"}
    assert all(row["missed"] == 0 for row in rows)
    ahead = [row for row in rows if row["policy"] == "look_ahead"]
    assert all(row["gap_closed"] > 0.5 and row["cost_ratio"] >= 1 for row in ahead)
    assert "look_ahead" in policies.words(rows)


def test_row_of_all_deadlines_adds_up_dollars():
    def row(policy, deadline, ratio):
        return {
            "policy": policy, "deadline": deadline, "cost_ratio": ratio,
            "best_usd": 100.0 * deadline, "missed": 1, "futures": 5,
        }  # fmt: skip

    rows = [
        row(policy, deadline, ratio)
        for deadline in policies.DEADLINES
        for policy, ratio in (("greedy", 1.5), ("look_ahead", 1.1))
    ]
    ahead = policies.of_all(rows)[1]
    assert (ahead["missed"], ahead["futures"]) == (4, 20)
    assert ahead["cost_ratio"] == 1.1
    assert ahead["gap_closed"] == 0.8
