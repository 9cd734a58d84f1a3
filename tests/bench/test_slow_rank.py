"""bench.slow_rank gives what its docstring says."""

import pytest

from bench import slow_rank


def test_rows_have_each_way_measured_beside_predicted(monkeypatch):
    monkeypatch.setattr(slow_rank, "WAYS", (None, "backup:1", "ssp:3"))
    monkeypatch.setattr(
        slow_rank, "cases", lambda ranks, steps: {"even": slow_rank.np.full((ranks, steps), 1e-3)}
    )
    rows = list(slow_rank.rows(2, 8))
    assert [row["way"] for row in rows] == ["None", "backup:1", "ssp:3"]
    assert all(row["gradients_per_s"] > 0 for row in rows)
    assert [row["predicted_gradients_per_s"] for row in rows] == pytest.approx([2e3, 1e3, 2e3])
