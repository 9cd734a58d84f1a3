"""bench.scoreboard: missing sets are said, and the errors in the docs are those of today."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from bench.scoreboard import DATA, SETS, Board, Pair, ranked, rows_of, show, write_constants
from penstock.estimate.predict import Estimate
from penstock.estimate.shipped import SHIPPED, load
from tests.bench.test_layouts import ROW, SAILOR

DOCS = Path(__file__).parents[2] / "docs" / "estimate.md"
NUMBER = re.compile(r"\d+\.\d+")
KEYS = {
    "set", "quantity", "rows", "held_out_by", "mape", "median", "max", "coverage", "aim",
    "aims_at", "reached", "best_known", "others", "ranking", "regret",
}  # fmt: skip


def test_sets_that_are_missing_are_said_one_by_one(tmp_path):
    said: list[str] = []
    assert rows_of(tmp_path, said.append) == []
    assert len(said) == len(SETS)
    assert all("skipped" in line and str(tmp_path) in line for line in said)


def test_sets_without_a_run_or_another_cluster_are_said(tmp_path):
    (tmp_path / "sailor.csv").write_text(f"{SAILOR}\n{ROW[SAILOR]}\n")
    said: list[str] = []
    found = [row["set"] for row in rows_of(tmp_path, said.append)]
    assert found == ["torchtitan"]
    assert sum("has no such run" in line for line in said) == 4
    assert sum("no other cluster" in line for line in said) == 2


@pytest.fixture(scope="module")
def rows():
    if not DATA.is_dir():
        pytest.skip(f"the measured sets are not in {DATA}")
    said: list[str] = []
    found = rows_of(DATA, said.append)
    if said:
        pytest.skip(said[0])
    return found


def _pair(predicted_s: float, measured_s: float, work: str) -> Pair:
    return Pair(Estimate(predicted_s, 0.0, 9.0, "", (), ""), measured_s, work)


def test_plans_for_the_same_work_are_ranked_and_the_one_taken_costs_its_regret():
    """Of four plans two neighbours change places, first and second; three are too few."""
    four = [_pair(p, m, "a") for p, m in ((1, 3.0), (2, 2.5), (3, 4.0), (4, 5.0))]
    few = [_pair(3 - p, p, "b") for p in (0.5, 1.0, 2.0)]
    found = ranked([*four, *few])
    assert found.ranking == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found.regret == pytest.approx(20.0)
    assert ranked(few) == (None, None)


def test_rows_have_the_keys_documented_and_are_json(rows):
    assert all(row.keys() == KEYS for row in rows)
    assert json.loads(json.dumps(rows)) == rows


def test_errors_are_those_of_the_docs(rows):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(rows)
    shown, (_, board, _) = out.getvalue(), DOCS.read_text().rsplit("```\n", 2)
    assert NUMBER.sub("x", shown) == NUMBER.sub("x", board)
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (shown, board)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.5)  # in percent


def test_clusters_are_left_out_first_and_no_row_of_theirs_is_seen(rows):
    names = [row["held_out_by"] for row in rows[:-1]]
    assert names[: names.count("cluster")] == ["cluster"] * names.count("cluster")
    board = Board(DATA)
    for pool in board.without("simumax"):
        assert "simumax" not in [one.name for one in pool.clusters]
    assert not any("torchtitan" in one.name for one in board.without("")[0].clusters)


def test_shipped_constants_are_those_that_the_sets_give(rows, tmp_path):
    path = tmp_path / "constants.json"
    write_constants(DATA, path)
    for made, shipped in zip(load(path), load(SHIPPED), strict=True):
        assert [one.name for one in made.clusters] == [one.name for one in shipped.clusters]
        assert made.middle == pytest.approx(shipped.middle, abs=0.02)
        for one in made.clusters:
            own, other = made.of(one.name).array, shipped.of(one.name).array
            assert own == pytest.approx(other, rel=0.05, abs=1e-6)
