"""bench.closed_forms: each formula by hand, and the errors in the docs are those of today."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.closed_forms import EARLIER, IMBALANCES, MESSAGES, exact, rows_of, show
from bench.formulas import (
    FORMULAS,
    Pipeline,
    alpa,
    dapple,
    galvatron,
    megatron,
    metis,
    pipedream,
    sailor,
    slowest,
)
from penstock.schedule import one_f_one_b
from penstock.simulate import table_of

DOCS = Path(__file__).parents[2] / "docs" / "simulate.md"


def pipeline(*forward_s: float, message_s: float = 0.0, m: int = 1) -> Pipeline:
    f = np.array(forward_s)
    return Pipeline(f, 2 * f, np.full(len(f) - 1, message_s), m)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (alpa, 21 + 4 * 9),
        (metis, 21 + 4 * 9 + 2),
        (megatron, 7 * 7),
        (slowest, 7 * 9),
        (sailor, 21 + 2.5 + 4 * (9 + 1)),
        (galvatron, 21 + 4 * 6),
        (dapple, 15 + 1 + 4 * 9),  # the pivot is stage 1: what lies behind it is left out
        (pipedream, 5 * 9),
    ],
)
def test_formula_by_hand(formula, expected):
    """Stages of 6, 9 and 6 s, five micro-batches, messages of half a second."""
    assert formula(pipeline(2.0, 3.0, 2.0, message_s=0.5, m=5)) == pytest.approx(expected)


def test_sailor_counts_the_message_of_a_long_pipelines_first_stage_twice():
    assert sailor(pipeline(1, 1, 1, message_s=0.5)) == 9 + 0.5 + 1.0 + 1.0
    assert sailor(pipeline(1, 1, 1, 1, message_s=0.5)) == 12 + 4 * 1.0


def test_galvatron_walks_along_a_slow_first_stage():
    """Warm-up and cool-down of two micro-batches of 9 s, then three more of them."""
    assert galvatron(pipeline(3.0, 1.0, 1.0, m=5)) == 2 * 9 + 3 * 9


def test_dapple_stays_at_the_last_stage_where_an_earlier_one_is_not_slower():
    assert dapple(pipeline(1.0, 1.0, 1.0, m=4)) == 9 + 3 * 3


@given(st.integers(1, 8), st.integers(1, 32), st.floats(0.1, 9.0))
def test_formulas_are_exact_for_equal_stages_and_free_messages(
    stages: int, m: int, forward_s: float
):
    """But PipeDream's, which never drains, and Galvatron's, where m is less than the stages."""
    table, given_ = table_of(one_f_one_b(stages, m)), pipeline(*[forward_s] * stages, m=m)
    for formula in (alpa, metis, megatron, slowest, sailor, dapple):
        assert formula(given_) == pytest.approx(exact(table, given_))
    if m >= stages:
        assert galvatron(given_) == pytest.approx(exact(table, given_))
    assert pipedream(given_) == pytest.approx(m * 3 * forward_s)


@pytest.fixture(scope="module")
def rows():
    return rows_of(400)


def test_rows_have_the_keys_documented_and_are_json(rows):
    assert {frozenset(row) for row in rows} == {
        frozenset({"case", "formula", "mean", "p95", "bias", "earlier"})
    }
    assert len(rows) == len(IMBALANCES) * len(MESSAGES) * len(FORMULAS)
    assert json.loads(json.dumps(rows)) == rows
    for row in rows:
        assert 0.0 <= abs(row["bias"]) <= row["mean"] * (1 + 1e-9) <= 100.0


def test_rows_are_the_same_at_every_call():
    assert rows_of(3) == rows_of(3)


def test_errors_are_those_of_the_earlier_study(rows):
    """As near as another random sample: its 400 samples scatter by up to a tenth."""
    compared = [row for row in rows if row["earlier"] is not None]
    assert len(compared) == len(EARLIER) * len(FORMULAS)
    for row in compared:
        assert row["mean"] == pytest.approx(row["earlier"], rel=0.12, abs=0.25), row


def test_errors_are_those_of_the_docs(rows):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        show(rows)
    assert out.getvalue() in DOCS.read_text()
