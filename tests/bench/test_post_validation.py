"""bench.post_validation gives what its docstring says."""

import pytest

from bench import post_validation


@pytest.mark.long
def test_rows_are_of_every_way_of_clipping(monkeypatch):
    monkeypatch.setattr(post_validation, "COMPUTE_S", 0.0)
    rows = list(post_validation.rows(steps=3, rounds=1))
    ways = [(row["clips"], row["how"]) for row in rows]
    assert ways[0] == ("none", "no clipping")
    assert ways[1:] == [(c, how) for c in ("none", "all", "some") for how in ("before", "after")]
    for row in rows:
        assert 0 < row["low_s"] <= row["step_s"] <= row["high_s"]
        assert row["ratio"] == row["step_s"] / rows[0]["step_s"]
