"""The page stands alone, draws what it was given, and is whole whatever that is."""

import json
import math
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ReportError
from penstock.plan import Decision
from penstock.report import lanes, report
from penstock.timeline import (
    LANES,
    SPAN_KINDS,
    Held,
    Span,
    Timeline,
    Totals,
    step_s,
)
from tests.report.samples import (
    HOSTILE,
    SUMMARY,
    Tree,
    a_plan,
    a_report,
    data_of,
    pipeline,
    rectangles,
    some_metrics,
    spent,
)

# --- the page ----------------------------------------------------------------------------------


def test_page_asks_nothing_of_a_network():
    page = a_report().html
    assert not re.search(r"://|@import|url\(|fetch\(|XMLHttp", page)
    tree = Tree(page)
    assert [link.attributes for link in tree.all("link")] == [{"rel": "icon", "href": "data:,"}]
    assert all("src" not in script.attributes for script in tree.all("script"))
    metas = [meta.attributes for meta in tree.all("meta")]
    policy = next(m["content"] for m in metas if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_names_with_markup_are_shown_and_not_run(tmp_path):
    plan = a_plan().changed(
        cut_names=(HOSTILE,), decisions=(Decision(HOSTILE, HOSTILE, "user", HOSTILE),)
    )
    spans = pipeline().spans
    timeline = Timeline(2, spans, meta=((HOSTILE, HOSTILE),))
    summary = {"val_loss": 1.0, HOSTILE: HOSTILE, f"{HOSTILE}_nats": 2.0}
    one = report(plan, timeline, timeline, metrics=some_metrics(), summary=summary, title=HOSTILE)
    one.save(tmp_path / "report.html")
    tree = Tree((tmp_path / "report.html").read_text("utf-8"))
    assert len(tree.all("script")) == 2
    assert len(tree.all("b")) == 0
    shown = "</script><script>alert(1)</script><b>\"'&\ufffd\ufffd"
    assert tree.all("h1")[0].text == shown
    assert tree.text.count(shown) > 8


def test_saved_page_is_the_page(tmp_path):
    one = a_report()
    one.save(tmp_path / "a" / "report.html")
    assert (tmp_path / "a" / "report.html").read_text("utf-8") == one.html
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["report.html"]


def test_figures_stand_to_the_right_and_headings_name_their_sections():
    tree = Tree(a_report().html)
    ids = [
        e.attributes["id"]
        for tag in ("h2", "svg", "g")
        for e in tree.all(tag)
        if "id" in e.attributes
    ]
    assert len(ids) == len(set(ids))
    named = [section.attributes["aria-labelledby"] for section in tree.all("section")]
    assert named == [h2.attributes["id"] for h2 in tree.all("h2")]
    assert len(named) == 5
    cells = [cell for cell in tree.all("td") if re.search(r"\d (ms|MiB|%)$", cell.text)]
    assert cells
    assert all(cell.attributes.get("class") == "n" for cell in cells if len(cell.text) < 12)


def test_every_file_that_is_not_python_is_in_the_package():
    root = Path(__file__).parents[2]
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = root / "src" / "penstock"
    there = {p.relative_to(package).as_posix() for p in (package / "report").iterdir()}
    assert {name for name in there if name.endswith((".css", ".js"))} <= set(
        listed["package-data"]["penstock"]
    )


def test_run_without_a_prediction_says_so():
    text = Tree(report(None, None, pipeline(), metrics=some_metrics()).html).text
    assert "no predicted timeline" in text
    assert "This run has no plan" in text
    assert "Measured: one step" in text
    assert "no predicted timeline" not in Tree(a_report().html).text


def test_prediction_alone_is_a_page():
    text = Tree(report(a_plan(), pipeline(), None).html).text
    assert "Nothing was measured" in text
    assert "Predicted: one step" in text


def test_timeline_of_totals_alone_says_that_it_has_no_spans():
    totals = Totals(2.0, (1.0, 1.5), (2**20, 2**20))
    bare = Timeline(2, Timeline.of(2, []).spans, totals=totals)
    text = Tree(report(None, bare, pipeline()).html).text
    assert "The predicted timeline has totals only" in text
    assert "Predicted: one step, 2.00 s" in text


def test_loss_that_is_no_number_breaks_the_curve_and_is_named():
    metrics = some_metrics(9)
    metrics[4]["loss"] = math.nan
    metrics[6]["loss"] = None
    page = a_report(metrics=metrics).html
    assert "The loss of steps 4, 6 is not a number" in page
    loss = next(
        c for c in Tree(page).all("svg", "chart") if c.attributes["aria-label"].startswith("Loss")
    )
    assert "NaN" not in loss.attributes["data-points"]
    assert re.search(r'class="curve measured"', page)
    paths = re.findall(r'<path d="([^"]*)" class="curve measured"><title>loss', page)
    assert paths[0].count("M") == 3


# --- the picture -------------------------------------------------------------------------------


def test_both_timelines_have_one_time_scale_and_begin_at_their_first_span():
    late = [
        Span(s.rank, s.lane, s.kind, s.stage, s.micro_batch, s.start_s + 7, s.end_s + 7)
        for s in pipeline(slow=2).spans
    ]
    page = report(None, pipeline(), Timeline.of(2, late)).html
    width = lanes.WIDTH - lanes.LEFT - lanes.RIGHT
    per_s = width / step_s(pipeline(slow=2))
    first, second = (rectangles(page, clock, "F")[0] for clock in (0, 1))
    assert first[0] == second[0] == lanes.LEFT
    assert first[2] == pytest.approx(0.01 * per_s - 1, abs=0.1)
    assert second[2] == pytest.approx(0.02 * per_s - 1, abs=0.1)
    assert second[1] > max(y + height for _, y, _, height in rectangles(page, 0, "B"))


def test_one_path_per_kind_and_clock_whatever_the_number_of_spans():
    tree = Tree(report(None, pipeline(4, 300), pipeline(4, 300)).html)
    spans = [p for p in tree.all("path", "span") if p.attributes["class"] != "span track"]
    assert len(spans) == 2 * len(SPAN_KINDS)
    assert len(tree.elements) < 5000


@given(st.integers(700, 4000), st.floats(0.1, 0.9))
def test_area_is_time_where_spans_are_narrower_than_pixels(count, share):
    """F takes `share` of every pair of spans; so it covers that share of the area, waiting none."""
    spans = []
    for m in range(count):
        spans.append(Span(0, "compute", "F", 0, m, m, m + share))
        spans.append(Span(0, "compute", "B", 0, m, m + share, m + 1))
    page = report(None, None, Timeline.of(1, spans)).html
    areas = {k: sum(w * h for _, _, w, h in rectangles(page, 0, k)) for k in "FB"}
    whole = 26 * (lanes.WIDTH - lanes.LEFT - lanes.RIGHT)
    gap = 0.13 * whole  # between wide spans, and the least height of one pixel
    assert areas["F"] == pytest.approx(share * whole, abs=gap)
    assert areas["B"] == pytest.approx((1 - share) * whole, abs=gap)


def test_no_span_is_lost_however_short():
    spans = [Span(0, "compute", "F", 0, 0, 0.0, 1.0), Span(0, "send", "B", 0, 0, 0.5, 0.5 + 1e-6)]
    _, _, width, height = rectangles(report(None, None, Timeline.of(1, spans)).html, 0, "B")[0]
    assert width * height >= 1


def test_script_data_holds_every_drawn_span():
    data = data_of(a_report().html)
    for block, timeline in zip(data["blocks"], (pipeline(), pipeline(slow=1.1)), strict=True):
        count = sum(len(row["spans"]) for row in block["rows"]) // 5
        assert count == len(timeline.spans)
        row = block["rows"][0]
        start, tick_s = 0, data["whole_s"] / data["ticks"]
        own = [s for s in timeline.spans if s.rank == 0 and s.lane in ("compute", "update")]
        own.sort(key=lambda span: span.start_s)
        for at, span in enumerate(own):
            kind, stage, number, since, length = row["spans"][5 * at : 5 * at + 5]
            start += since
            assert (SPAN_KINDS[kind], stage, number) == (span.kind, span.stage, span.micro_batch)
            assert start * tick_s == pytest.approx(span.start_s, abs=1e-9)
            assert length * tick_s == pytest.approx(span.end_s - span.start_s, abs=1e-9)


def test_lanes_without_spans_are_left_out():
    rows = data_of(report(None, None, pipeline(1, 2)).html)["blocks"][0]["rows"]
    assert [row["lane"] for row in rows] == ["compute"]
    rows = data_of(a_report().html)["blocks"][0]["rows"]
    assert [row["lane"] for row in rows] == ["compute", "send", "receive"] * 2


# --- robustness --------------------------------------------------------------------------------

times = st.floats(-1e15, 1e15)
small = st.integers(-1, 2**31 - 1)


@st.composite
def timelines(draw_from: st.DrawFn) -> Timeline:
    ranks = draw_from(st.integers(0, 3))
    rank = st.integers(0, max(0, ranks - 1))
    span = st.builds(
        lambda rank, lane, kind, stage, m, pair: Span(rank, lane, kind, stage, m, *sorted(pair)),
        *(rank, st.sampled_from(LANES), st.sampled_from(SPAN_KINDS), small, small),
        st.tuples(times, times),
    )
    held = st.builds(Held, rank, times, st.integers(-(2**62), 2**62))
    size = 6 if ranks else 0
    return Timeline.of(
        ranks,
        draw_from(st.lists(span, max_size=size)),
        draw_from(st.lists(held, max_size=size)),
        meta=draw_from(st.lists(st.tuples(st.text(), st.text()), max_size=2).map(tuple)),
    )


number = st.floats() | st.integers() | st.none()
metric = st.fixed_dictionaries(
    {"step": st.integers(-(2**53), 2**53), "loss": number, "seconds": number},
    optional={"samples_per_second": number, "tokens_per_second": number},
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=5,
)
sizes = st.lists(st.integers(0, 2**63), max_size=3)
seconds = st.floats(0, 1e15) | st.none()
summaries = st.fixed_dictionaries(
    {},
    optional={
        "val_loss": number,
        "step_s_predicted": seconds,
        "step_s_measured": seconds,
        "peak_bytes_predicted": sizes,
        "peak_bytes_measured": sizes,
        "cap_bytes": sizes | st.none() | st.integers(0, 2**50),
        "x_nats": number,
        "breakdown": st.sampled_from([None, spent().to_json(), spent(1, data=1e3).to_json()]),
        "more": anything,
    },
)


@given(
    st.none() | timelines(),
    st.none() | timelines(),
    st.lists(metric, max_size=4),
    summaries,
    st.text(),
)
def test_whatever_the_figures_the_page_is_whole(predicted, measured, metrics, summary, title):
    one = report(None, predicted, measured, metrics=metrics, summary=summary, title=title)
    one.html.encode()
    tree = Tree(one.html)
    for picture in tree.all("svg", "chart"):
        json.loads(picture.attributes["data-points"], parse_constant=pytest.fail)
    for path in tree.all("path"):
        assert not re.search("nan|inf|e[+-]", path.attributes["d"] or "")
    if predicted is not None or measured is not None:
        json.dumps(data_of(one.html), allow_nan=False)


@given(
    st.lists(st.dictionaries(st.sampled_from(["step", "loss", "seconds"]), anything), max_size=2)
)
def test_metrics_of_wrong_types_are_refused_or_shown(metrics):
    check_whole_or_refused("of the metrics", metrics=metrics)


@given(
    st.dictionaries(st.sampled_from([*SUMMARY, "other"]), anything, max_size=4),
)
def test_summary_of_wrong_types_is_refused_or_shown(summary):
    check_whole_or_refused("the summary", summary=summary)


def check_whole_or_refused(place: str, **parts: object) -> None:
    refusals = list[ReportError]()
    try:
        Tree(report(None, None, None, **parts).html)  # type: ignore[arg-type]
    except ReportError as problem:
        refusals.append(problem)
    assert all(place in str(problem) and problem.hint for problem in refusals)
