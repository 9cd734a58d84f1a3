"""bench.sharing gives what its docstring says."""

import contextlib
import io
import json
import random
import sys

import pytest

from bench import sharing


@pytest.fixture(scope="module")
def rows():
    return sharing.rows_of(cases=12)


def test_no_rule_is_faster_than_ours(rows):
    assert {row["search"] for row in rows} == {"sharding", "bare 500", "shares"}
    for row in rows:
        assert 0 <= row["fits"] <= row["of"] <= 12
        assert row["gap"] < 1e-3
        if row["fits"]:
            assert 1 - 1e-9 <= row["p10"] <= row["p90"] <= row["worst"]


def test_samples_by_speed_are_the_whole_batch():
    for seed in range(20):
        workers = list(sharing.random_workers(random.Random(seed)))
        samples = sharing.samples_by_speed(workers)
        assert sum(samples) == sharing.BATCH
        fast = min(range(len(workers)), key=lambda at: workers[at].batch_s[-1])
        assert samples[fast] >= max(samples) - 1


def test_command_prints_a_table_or_json(monkeypatch, rows):
    monkeypatch.setattr(sharing, "rows_of", lambda cases: rows)
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["sharing", *flags])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            sharing.main()
        if flags:
            assert json.loads(out.getvalue())["rows"] == rows
        else:
            assert all(row["rule"] in out.getvalue() for row in rows)
