"""bench.search: its rows have their keys, its cases are what they say, its aims are reached."""

import contextlib
import io
import json
import sys

import pytest

from bench import search

KEYS = {"case", "seconds", "peer_seconds", "ratio"}


@pytest.fixture(scope="module")
def rows():
    return {row["case"]: row for row in search.rows_of(quick=True)}


def test_rows_have_their_keys_and_the_seconds_of_peers(rows):
    assert all(row.keys() >= KEYS for row in rows.values())
    peers = {case: row["peer_seconds"] for case, row in rows.items()}
    assert peers["mixed"] == peers["mixed slow"] == 0.80
    assert peers["flat 98 x 64"] == 9.0
    # 11.7 million configurations, 127 a second
    assert peers["gpt3 1024"] == pytest.approx(11.7e6 / 127, rel=1e-5)
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["seconds"] / row["peer_seconds"])


def test_every_candidate_is_found_or_counted(rows):
    for case in ("gpt3 1024", "mixed", "mixed slow"):
        assert rows[case]["candidates"] > 500
        assert 0 < sum(rows[case]["rejected"].values()) < rows[case]["candidates"]


def test_whole_space_of_gpt3_is_searched():
    found = search.gpt3(1024)
    assert found.candidates > 28_000
    assert found.best.run.ranks == 1024
    assert found.best.run.model.parameters == pytest.approx(175e9, rel=0.01)
    run = found.best.run
    assert run.data * run.micro_batch * run.num_micro_batches == search.BATCH


@pytest.mark.long
def test_aims_are_reached_in_processor_time():
    """With room: a loaded machine is slower, also in processor time."""
    assert min(search._timed(lambda: search.gpt3(1024))[1] for _ in range(3)) < 5.0


def test_command_prints_a_table_or_json(monkeypatch, rows):
    monkeypatch.setattr(search, "rows_of", lambda *, quick: list(rows.values()))
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["search", *flags])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            search.main()
        if flags:
            assert [row["case"] for row in json.loads(out.getvalue())["rows"]] == list(rows)
        else:
            assert "gpt3 1024" in out.getvalue()
