"""bench.planners: rows have their keys, cases are what they say, the reference is best."""

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.planners import compare as planners
from bench.planners.published import PLANNERS

KEYS = {"planner", "case", "ratio_median", "ratio_worst", "out_of_memory", "seconds"}
DOCS = Path(__file__).parents[3] / "docs" / "bench.md"


@pytest.fixture(scope="module")
def rows():
    return planners.rows_of(2)


@pytest.fixture(scope="module")
def rows_of_one():
    return planners.rows_of(1)


@pytest.mark.long
def test_rows_have_their_keys_and_there_is_one_for_every_planner_and_case(rows):
    assert all(row.keys() >= KEYS for row in rows)
    names = ["reference", "reference, 1F1B", *(planner.name for planner in PLANNERS)]
    cases = [case.__name__ for case in planners.CASES]
    assert [(row["planner"], row["case"]) for row in rows] == [(n, c) for c in cases for n in names]


@pytest.mark.long
def test_no_planner_is_faster_than_the_reference(rows):
    for row in rows:
        if row["ratio_least"] is not None:
            assert 1 - 1e-9 <= row["ratio_least"] <= row["ratio_median"] <= row["ratio_worst"]
        if row["planner"] == "reference":
            assert row["ratio_worst"] == 1
            assert row["out_of_memory"] == 0


@pytest.mark.long
def test_rows_but_for_the_seconds_are_the_same_again(rows, monkeypatch):
    monkeypatch.setattr(planners, "CASES", planners.CASES[:1])
    for row, again in zip(rows, planners.rows_of(2), strict=False):
        assert row | {"seconds": 0} == again | {"seconds": 0}


@pytest.mark.long
def test_plan_that_does_not_fit_is_counted_and_has_no_ratio(rows_of_one):
    memory = [row for row in rows_of_one if row["case"] == "memory"]
    short = [row for row in memory if row["planner"] == "PipeDream"]
    assert 0 <= short[0]["out_of_memory"] <= 1
    unlimited = [row for row in rows_of_one if row["case"] != "memory"]
    assert {row["out_of_memory"] for row in unlimited} == {0}


@pytest.mark.parametrize("case", planners.CASES)
@pytest.mark.parametrize("seed", range(5))
def test_case_is_what_it_says(case, seed):
    problem = case(np.random.default_rng(seed))
    assert problem == case(np.random.default_rng(seed))
    links = np.array(problem.bytes_per_s)
    assert (links == links.T).all()
    kinds = 2 if case in (planners.mixed, planners.memory) else 1
    assert len(problem.kinds) == kinds
    assert (problem.kinds[0].memory_bytes < np.inf) == (case is planners.memory)
    if case is planners.regions:  # slower than any link between hosts can be
        assert problem.num_devices < 2 or links.min() <= 3 * planners.ACROSS
    else:
        assert links.min() >= 0.3 * planners.BETWEEN
    if kinds == 2:
        fast, slow = problem.kinds
        assert sum(slow.layer_s) > 1.2 * sum(fast.layer_s)


@pytest.mark.long
def test_command_prints_a_table_or_json(monkeypatch):
    more = {"samples", "ratio_least", "ratio_1f1b_least"}
    figures = dict.fromkeys(KEYS - {"planner", "case"} | more, 1)
    names = ["reference", "reference, 1F1B", *(planner.name for planner in PLANNERS)]
    cases = [case.__name__ for case in planners.CASES]
    made = [{"planner": n, "case": c, **figures} for c in cases for n in names]
    monkeypatch.setattr(planners, "rows_of", lambda samples: made)
    for flags in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["planners", *flags])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            planners.main()
        if flags:
            assert json.loads(out.getvalue())["rows"] == made
        else:
            assert all(planner.name in out.getvalue() for planner in PLANNERS)


def test_table_in_the_docs_has_every_planner():
    page = DOCS.read_text()
    assert all(f"| {planner.name} |" in page for planner in PLANNERS)
