"""Words, scales and thinning: what is said of a figure, and what is left out of a picture."""

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.report import report
from penstock.report.figure_words import (
    bytes_text,
    error_of,
    number_text,
    percent_text,
    seconds_text,
    time_unit,
)
from penstock.report.scale import ticks, time_labels
from penstock.report.thin import choose, drawn_spans, envelope, even_ranks
from penstock.timeline import (
    Span,
    Timeline,
)
from tests.report.samples import Tree, a_report, pipeline

# --- words and scales --------------------------------------------------------------------------


def test_error_is_below_zero_where_the_prediction_was_too_low():
    assert error_of(0.9, 1.0) == pytest.approx(-0.1)
    assert error_of(None, 1.0) is None
    assert error_of(1.0, 0.0) is None
    assert error_of(0.0, 0.0) == 0.0
    assert percent_text(-0.1) == "\u221210.0 %"
    assert percent_text(None) == "\u2013"


@given(st.floats())
def test_every_float_has_a_short_text(value: float):
    texts = [f(value) for f in (seconds_text, bytes_text, number_text, percent_text)]
    texts += [time_unit([value]).of(value), time_unit([1.0]).of(value)]
    assert all(0 < len(text) < 30 for text in texts)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(3, 12), st.booleans())
def test_ticks_are_round_increasing_and_within_the_range(low, length, about, binary):
    high = low + length
    found = ticks(low, high, about=about, binary=binary)
    assert list(found) == sorted(set(found))
    assert low - 1e-6 * length <= found[0] <= found[-1] <= high + 1e-6 * length
    assert len(found) <= about + 1
    if len(found) > 2:
        step = found[1] - found[0]
        mantissa = float(f"{step:e}".split("e")[0])
        assert (
            math.log2(step) == pytest.approx(round(math.log2(step)))
            if binary
            else (min(abs(mantissa - round_) for round_ in (1, 2, 5, 10)) < 1e-3)
        )


@given(st.floats(0, 1e6), st.floats(1e-6, 1e6))
def test_marks_of_a_time_axis_have_different_texts(low, length):
    marks = ticks(low, low + length, about=10)
    assert len(set(time_labels(marks))) == len(marks)


# --- thinning ----------------------------------------------------------------------------------


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 9))
def test_envelope_keeps_both_ends_and_every_columns_peaks(values, columns):
    xs, ys = np.arange(len(values), dtype=float), np.array(values)
    kept = envelope(xs, ys, columns=columns)
    assert list(kept) == sorted(set(kept.tolist()))
    assert len(kept) <= 4 * columns
    assert {0, len(values) - 1} <= set(kept.tolist())
    at = np.minimum(xs / max(xs[-1], 1) * columns, columns - 1).astype(int)
    for column in set(at.tolist()):
        inside = ys[at == column]
        left = ys[[k for k in kept if at[k] == column]]
        assert (left.min(), left.max()) == (inside.min(), inside.max())


@given(st.integers(1, 2000), st.integers(1, 40))
def test_drawn_ranks_are_even_and_have_the_first_and_the_last(num_ranks, count):
    ranks = even_ranks(num_ranks, count)
    assert len(ranks) == len(set(ranks)) == min(num_ranks, count)
    assert ranks[0] == 0
    assert ranks[-1] == num_ranks - 1 or count == 1
    gaps = {b - a for a, b in itertools.pairwise(ranks)}
    assert not gaps or max(gaps) - min(gaps) <= 2


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 500))
def test_no_more_spans_are_drawn_than_the_limit(num_ranks, per_rank, limit):
    spans = [
        Span(rank, "compute", "F", rank, m, float(m), m + 0.5)
        for rank in range(num_ranks)
        for m in range(per_rank)
    ]
    timeline = Timeline.of(num_ranks, spans)
    drawn = choose([timeline], limit)
    count = len(drawn_spans(timeline, drawn))
    assert count <= limit
    assert len(drawn.ranks) <= 32
    if num_ranks <= 8 and num_ranks * per_rank <= limit:
        assert (drawn.whole, count) == (True, num_ranks * per_rank)


def test_ranks_are_left_out_before_time_is_cut():
    spans = [
        Span(rank, "compute", "F", rank, m, float(m), m + 0.5)
        for rank in range(64)
        for m in range(100)
    ]
    timeline = Timeline.of(64, spans)
    chosen = [choose([timeline], limit) for limit in (3200, 1600, 900, 400)]
    assert [len(drawn.ranks) for drawn in chosen] == [32, 16, 8, 8]
    assert [drawn.until_s for drawn in chosen] == [math.inf, math.inf, math.inf, 50.0]


def test_page_says_what_was_too_much_to_draw():
    page = report(None, pipeline(40, 2), pipeline(40, 3)).html
    text = Tree(page).text
    assert "32 of 40 ranks" in text
    assert re.search(r"predicted 4\d\d of [56]\d\d spans", text)
    assert "32 of 40 ranks have rows of their own" in text
    assert "Too much" not in Tree(a_report().html).text
