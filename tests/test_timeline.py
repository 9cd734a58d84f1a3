"""Timeline: sums, picture, file and alignment."""

import doctest
import json
import math
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TimelineError
from penstock.timeline import (
    LANES,
    SPAN_KINDS,
    Held,
    MemoryCurve,
    Span,
    Spans,
    Timeline,
    Totals,
    bubble_fraction,
    busy_s,
    draw,
    peak_bytes,
    step_s,
)
from tests.kinds import kind_s

times = st.floats(-1e12, 1e12, allow_nan=False)
small = st.integers(-1, 2**31 - 1)


@st.composite
def timelines(draw_from: st.DrawFn, num_ranks: int | None = None) -> Timeline:
    ranks = draw_from(st.integers(1, 4)) if num_ranks is None else num_ranks
    rank = st.integers(0, ranks - 1)
    pairs = st.tuples(times, times).map(sorted)
    span = st.builds(
        lambda rank, lane, kind, stage, micro_batch, pair: Span(
            rank, lane, kind, stage, micro_batch, *pair
        ),
        *(rank, st.sampled_from(LANES), st.sampled_from(SPAN_KINDS), small, small, pairs),
    )
    held = st.builds(Held, rank, times, st.integers(0, 2**62))
    meta = st.dictionaries(st.text(), st.text(), max_size=3).map(lambda d: tuple(sorted(d.items())))
    lists = draw_from(st.lists(span, max_size=8)), draw_from(st.lists(held, max_size=8))
    return Timeline.of(ranks, *lists, meta=draw_from(meta))


def two_ranks() -> Timeline:
    spans = [
        Span(0, "compute", "F", 0, 0, 0.0, 1.0),
        Span(0, "send", "F", 0, 0, 1.0, 1.5),
        Span(1, "receive", "F", 0, 0, 1.0, 1.5),
        Span(1, "compute", "F", 1, 0, 1.5, 3.0),
        Span(1, "update", "U", 1, 0, 3.0, 4.0),
        Span(1, "collective", "reduce", 1, 0, 4.0, 6.0),
    ]
    return Timeline.of(
        2, spans, [Held(0, 0.0, 5), Held(1, 0.0, 7), Held(1, 2.0, 9), Held(1, 3.0, 1)]
    )


def test_sums_count_computes_and_updates_but_no_messages_or_collectives():
    timeline = two_ranks()
    assert step_s(timeline) == 6.0
    assert [busy_s(timeline, rank) for rank in range(2)] == [1.0, 2.5]
    assert bubble_fraction(timeline) == 1 - 3.5 / 12
    assert peak_bytes(timeline) == (5, 9)
    assert kind_s(timeline, "F") == (1.0, 1.5)
    assert kind_s(timeline, "reduce", lane="collective") == (0.0, 2.0)


def test_step_begins_at_the_first_start():
    assert step_s(Timeline.of(1, [Span(0, "compute", "F", 0, 0, 3.0, 5.0)])) == 2.0


def test_empty_timeline_has_no_seconds_no_bubble_and_an_empty_picture():
    empty = Timeline.of(2, [])
    assert (step_s(empty), bubble_fraction(empty), peak_bytes(empty)) == (0.0, 0.0, (0, 0))
    assert draw(empty) == "rank 0\nrank 1"
    assert draw(Timeline.of(0, [])) == ""


def test_timeline_prints_itself_in_one_line():
    assert str(two_ranks()) == "2 ranks, 6 spans, 6.00 s, bubble 70.8 %, peak 9 B"


def test_given_totals_stand_in_for_spans():
    bare = Timeline(2, Spans.of([]), totals=Totals(4.0, (1.0, 3.0), (5, 6)))
    assert (step_s(bare), busy_s(bare, 1), peak_bytes(bare), bubble_fraction(bare)) == (
        4.0,
        3.0,
        (5, 6),
        0.5,
    )


@given(timelines())
def test_spans_look_like_a_sequence_of_span(timeline: Timeline):
    spans = timeline.spans
    assert Spans.of(spans) == spans
    assert [spans[at] for at in range(len(spans))] == list(spans)
    assert list(spans.where(spans.kinds == 0)) == [span for span in spans if span.kind == "F"]
    memory = timeline.memory
    assert MemoryCurve.of(memory) == memory
    assert [memory[at] for at in range(len(memory))] == list(memory)


def test_columns_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        two_ranks().spans.starts_s[0] = 7.0


@pytest.mark.parametrize(
    ("spans", "memory", "says"),
    [
        (
            [Span(2, "compute", "F", 0, 0, 0.0, 1.0)],
            [],
            "a span of rank 2 in a timeline of 2 ranks",
        ),
        ([Span(-1, "compute", "F", 0, 0, 0.0, 1.0)], [], "a span of rank -1"),
        ([], [Held(2, 0.0, 1)], "a memory entry of rank 2"),
        (
            [Span(0, "compute", "F", 4, 3, 2.0, 1.0)],
            [],
            "span 0, F4.3 of rank 0, runs from 2.0 s to 1.0 s",
        ),
        ([Span(0, "compute", "F", 0, 0, 0.0, math.inf)], [], "to inf s"),
        ([], [Held(0, math.nan, 1)], "no number of seconds"),
    ],
)
def test_impossible_timeline_is_refused(spans: list[Span], memory: list[Held], says: str):
    with pytest.raises(TimelineError, match=says):
        Timeline.of(2, spans, memory)


def test_columns_of_different_lengths_or_codes_without_a_name_are_refused():
    good = two_ranks().spans
    with pytest.raises(TimelineError, match="different lengths"):
        Spans(
            good.ranks[:3],
            good.lanes,
            good.kinds,
            good.stages,
            good.micro_batches,
            good.starts_s,
            good.ends_s,
        )
    codes = np.full(len(good), 9, np.uint8)
    with pytest.raises(TimelineError, match="a span has lane 9 of 0 to 5"):
        Spans(
            good.ranks,
            codes,
            good.kinds,
            good.stages,
            good.micro_batches,
            good.starts_s,
            good.ends_s,
        )
    with pytest.raises(TimelineError, match="totals of 1 and 0 ranks"):
        Timeline(2, good, totals=Totals(1.0, (1.0,), ()))


def test_picture_shows_starts_continuations_and_idle_columns():
    spans = [Span(0, "compute", "F", 0, 0, 5.0, 6.0), Span(0, "compute", "B", 0, 0, 8.0, 10.0)]
    assert draw(Timeline.of(1, spans)) == "rank 0  F0 .  .  B0 -"


def test_picture_in_the_docstring_is_what_is_drawn():
    rank_0 = [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 4, 6), ("B", 1, 7, 9)]
    rank_1 = [("F", 0, 1, 2), ("B", 0, 2, 4), ("F", 1, 4, 5), ("B", 1, 5, 7)]
    spans = [
        Span(rank, "compute", kind, rank, micro_batch, start, end)
        for rank, own in enumerate((rank_0, rank_1))
        for kind, micro_batch, start, end in own
    ]
    assert draw.__doc__ is not None
    assert textwrap.indent(draw(Timeline.of(2, spans)), " " * 8) in draw.__doc__


def test_picture_shows_what_runs_in_the_middle_of_a_column():
    spans = [Span(0, "compute", "F", 0, 0, 0.0, 0.4), Span(0, "compute", "F", 0, 1, 0.4, 1.6)]
    assert draw(Timeline.of(1, spans), unit_s=1.0) == "rank 0  F1 -"


def test_picture_names_stages_where_a_rank_has_others_than_its_own():
    spans = [
        Span(0, "compute", "F", 0, 0, 0, 1),
        Span(1, "compute", "F", 1, 0, 1, 2),
        Span(0, "compute", "F", 2, 0, 2, 3),
    ]
    assert draw(Timeline.of(2, spans)) == "rank 0  F0.0 .    F2.0\nrank 1  .    F1.0 ."


def test_picture_of_a_long_timeline_has_at_most_400_columns():
    spans = [Span(0, "compute", "F", 0, m, m * 1.0, m + 1.0) for m in range(2000)]
    assert len(draw(Timeline.of(1, spans)).split()) - 2 == 400


def test_picture_refuses_a_column_without_length():
    with pytest.raises(ValueError, match=r"unit_s is 0\.0 s"):
        draw(two_ranks(), unit_s=0.0)


def test_rank_names_line_up():
    lines = draw(
        Timeline.of(11, [Span(r, "compute", "F", r, 0, 0, 1) for r in range(11)])
    ).splitlines()
    assert (lines[0], lines[10]) == ("rank 0   F0", "rank 10  F0")


@given(timelines())
def test_file_gives_back_the_same_timeline_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, timeline: Timeline
):
    path = tmp_path_factory.mktemp("timeline") / "t.trace.json"
    timeline.save(path)
    assert Timeline.load(path) == timeline


def test_file_is_chrome_trace_json(tmp_path: Path):
    two_ranks().save(tmp_path / "t.json")
    document = json.loads((tmp_path / "t.json").read_text())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert spans[1] == {
        "ph": "X",
        "name": "F0.0",
        "cat": "send",
        "pid": 0,
        "tid": 1,
        "ts": 1_000_000,
        "dur": 500_000,
        "args": {"kind": "F", "stage": 0, "micro_batch": 0},
    }
    assert spans[-1]["name"] == "reduce 1"
    counters = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert counters[2] == {
        "ph": "C",
        "name": "memory",
        "pid": 1,
        "ts": 2_000_000,
        "args": {"bytes": 9},
    }
    names = [
        event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["pid"] == 1
    ]
    assert names == ["rank 1", *LANES]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ('"ts": 1500000', '"ts": "1"'),
            "traceEvents[17].ts is '1', not a number",
        ),
        (('"ts": 1500000', '"ts": NaN'), "NaN is no number"),
        (('"ts": 1500000', '"ts": 1e9999999'), "timeline"),
        (('"ts": 1500000', '"ts": 1e99999999999999999999'), "timeline"),
        (('"dur": 1500000', '"dur": -1'), "runs from 1.5 s to"),
        (('"dur": 1500000, ', ""), "traceEvents[17].dur is missing"),
        (('"cat": "update"', '"cat": "lunch"'), "cat is 'lunch', not one of compute, send"),
        (('"kind": "U"', '"kind": "V"'), "kind is 'V', not one of F, B, I, W, U"),
        (('"stage": 1', '"stage": 1.5'), "is 1.5, not a whole number"),
        (('"stage": 1', '"stage": 4294967296'), "not a whole number of at most 32 bits"),
        (('"pid": 1, "tid": 2', '"pid": true, "tid": 2'), "is True, not a whole number"),
        (('"bytes": 9', '"bytes": 9223372036854775808'), "not a whole number below 2 ** 63"),
        (
            ("penstock timeline 1", "something else"),
            "otherData.schema is 'something else', not one of penstock timeline 1",
        ),
        (('"num_ranks": 2', '"num_ranks": 1'), "rank 1 in a timeline of 1 ranks"),
        (('"meta": {}', '"meta": []'), "otherData.meta is [], not an object"),
        (('"meta": {}', '"meta": {"a": 1}'), "is 1, not a text"),
        (
            ('"traceEvents": [', '"traceEvents": [7, '),
            "traceEvents[0] is 7, not an object",
        ),
        (('"traceEvents"', '"events"'), "traceEvents is missing"),
    ],
)
def test_damaged_file_is_refused_with_its_place(tmp_path: Path, change: tuple[str, str], says: str):
    path = tmp_path / "t.json"
    two_ranks().save(path)
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(TimelineError) as caught:
        Timeline.load(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


@given(st.data())
def test_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    two_ranks().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 3))])
    with pytest.raises(TimelineError, match="not readable JSON"):
        Timeline.load(path)


def test_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(TimelineError, match=r"cannot read timeline .*none\.json: No such file"):
        Timeline.load(tmp_path / "none.json")


def test_file_that_is_no_text_is_refused(tmp_path: Path):
    (tmp_path / "t.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TimelineError, match="not readable JSON"):
        Timeline.load(tmp_path / "t.json")


def test_examples_of_the_page_are_what_runs():
    page = Path(__file__).parents[1] / "docs" / "timeline.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 5
    assert result.failed == 0
