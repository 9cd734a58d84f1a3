"""Report: the figures are right, the page stands alone, and a real browser shows it."""

import html
import itertools
import json
import math
import re
import subprocess
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError, PlanError, ReportError, TimelineError
from penstock.plan import Decision, Plan, Prediction
from penstock.report import Report, lanes, report, report_of, wall
from penstock.report.compare import compare
from penstock.report.of_run import report as report_run
from penstock.report.scale import ticks, time_labels
from penstock.report.thin import choose, drawn_spans, envelope, even_ranks
from penstock.report.words import (
    bytes_text,
    error_of,
    number_text,
    percent_text,
    seconds_text,
    time_unit,
)
from penstock.timeline import (
    LANES,
    PARTS,
    SPAN_KINDS,
    Breakdown,
    Held,
    Span,
    Timeline,
    Totals,
    breakdown_of,
    busy_s,
    peak_bytes,
    step_s,
)

HOSTILE = "</script><script>alert(1)</script><b>\"'&\x00\ud800"


def pipeline(num_ranks: int = 2, micro_batches: int = 4, *, slow: float = 1.0) -> Timeline:
    """Return 1F1B by hand: F 10 ms, B 20 ms, messages 1 ms, U 5 ms, times `slow`."""
    done: dict[tuple[str, int, int], float] = {}
    spans, held, now = list[Span](), list[Held](), [0.0] * num_ranks
    todo = [_order(num_ranks - rank, micro_batches) for rank in range(num_ranks)]
    while any(todo):
        for rank in range(num_ranks):
            while todo[rank]:
                kind, m = todo[rank][0]
                other = rank - 1 if kind == "F" else rank + 1
                ready = done.get((kind, other, m)) if 0 <= other < num_ranks else 0.0
                if ready is None:
                    break
                if 0 <= other < num_ranks:
                    where = (kind, other, m, ready, ready + 0.001 * slow)
                    spans += [Span(other, "send", *where), Span(rank, "receive", *where)]
                    ready += 0.001 * slow
                start = max(now[rank], ready)
                now[rank] = start + (0.01 if kind == "F" else 0.02) * slow
                spans.append(Span(rank, "compute", kind, rank, m, start, now[rank]))
                held.append(Held(rank, now[rank], (100 + m) * 2**20))
                done[kind, rank, m] = now[rank]
                todo[rank].pop(0)
    for rank in range(num_ranks):
        spans.append(Span(rank, "update", "U", rank, 0, now[rank], now[rank] + 0.005 * slow))
    return Timeline.of(num_ranks, spans, held, meta=(("made by", "hand"),))


def _order(warm_up: int, micro_batches: int) -> list[tuple[str, int]]:
    order = [("F", m) for m in range(min(warm_up, micro_batches))]
    for m in range(micro_batches):
        order.append(("B", m))
        if m + warm_up < micro_batches:
            order.append(("F", m + warm_up))
    return order


def a_plan(num_ranks: int = 2, name: str = "blocks.1") -> Plan:
    return Plan(
        graph="9f31c2aa",
        cuts=tuple(range(1, num_ranks)),
        cut_names=tuple(f"{name}.{k}" for k in range(1, num_ranks)),
        schedule="one_f_one_b",
        num_micro_batches=4,
        num_ranks=num_ranks,
        decisions=(Decision("schedule", "one_f_one_b", "search", "saves 31 ms over gpipe"),),
        predicted=Prediction(0.1, (2**20,) * num_ranks),
    )


def some_metrics(count: int = 20) -> list[dict[str, object]]:
    lines = []
    for step in range(count):
        rates = {"samples_per_second": 10.0, "tokens_per_second": 2560.0}
        lines.append({"step": step, "loss": 5 - step / 10, "seconds": 0.2, **rates})
    return lines


SUMMARY = {
    "val_loss": 2.25,
    "unigram_entropy_nats": 3.5,
    "step_s_predicted": 0.18,
    "step_s_measured": 0.2,
    "peak_bytes_predicted": [90 * 2**20, 80 * 2**20],
    "peak_bytes_measured": [100 * 2**20, 95 * 2**20],
    "cap_bytes": 2**28,
    "corpus": "stdlib",
}


def a_report(**changes: object) -> Report:
    parts = {"metrics": some_metrics(), "summary": SUMMARY, "title": "runs/gpt", **changes}
    return report(a_plan(), pipeline(), pipeline(slow=1.1), **parts)  # type: ignore[arg-type]


class Tree(HTMLParser):
    """The elements of a page: (tag, attributes, text); fails where they are not nested."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, dict(attrs), list[str]())
        assert len(dict(attrs)) == len(attrs)
        self.elements.append(element)
        if tag not in ("meta", "link", "br"):
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, class_: str = "") -> list[SimpleNamespace]:
        return [
            SimpleNamespace(attributes=attributes, text="".join(text))
            for name, attributes, text in self.elements
            if name == tag and set(class_.split()) <= set((attributes.get("class") or "").split())
        ]

    @property
    def text(self) -> str:
        return "".join(self.elements[0][2])


def data_of(page: str) -> dict[str, object]:
    data = [one for one in Tree(page).all("script") if one.attributes.get("id") == "data"]
    return json.loads(data[0].text)


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


# --- the figures -------------------------------------------------------------------------------


def test_rows_hold_counts_seconds_waiting_and_the_step():
    rows = {(row.rank, row.what): row for row in compare(pipeline(), pipeline(slow=2), (0, 1))}
    assert rows[0, "F"].counts == (4, 4)
    assert rows[0, "F"].seconds == pytest.approx((0.04, 0.08))
    assert rows[None, "B"].counts == (8, 8)
    assert rows[None, "B"].seconds == pytest.approx((0.08, 0.16))
    assert rows[1, "received"].counts == (4, 4)
    assert rows[1, "sent"].seconds == pytest.approx((0.004, 0.008))
    assert rows[0, "step"].seconds[0] == step_s(pipeline())
    assert (0, "I") not in rows


@given(st.integers(1, 4), st.integers(1, 6))
def test_work_and_waiting_are_the_whole_step(num_ranks, micro_batches):
    timeline = pipeline(num_ranks, micro_batches)
    rows = compare(timeline, None, tuple(range(num_ranks)))
    for rank in range(num_ranks):
        own = {row.what: row.seconds.predicted for row in rows if row.rank == rank}
        assert own["F"] + own["B"] + own["U"] + own["waiting"] == pytest.approx(own["step"])
        assert own["step"] - own["waiting"] == pytest.approx(busy_s(timeline, rank))
    assert all(row.seconds.measured is None for row in rows)


def test_headline_states_step_memory_and_loss():
    text = str(a_report())
    assert "One step took 200 ms; 180 ms was predicted (\u221210.0 %)." in text
    assert "rank, 0, held 100 MiB of its 256 MiB; 90.0 MiB was predicted (\u221210.0 %)" in text
    assert "validation loss is 2.25, against 3.5 for unigram entropy" in text
    cards = next(card.text for card in Tree(a_report().html).all("dl", "cards"))
    for figure in ("200 ms", "100 MiB", "39.1 % of 256 MiB", "2.25", "2,560", "180 ms"):
        assert figure in cards


def test_figures_missing_in_the_summary_come_from_timelines_and_plan():
    one = report(a_plan(), pipeline(), pipeline(slow=2))
    took = seconds_text(step_s(pipeline(slow=2)))
    assert f"One step took {took}; {seconds_text(step_s(pipeline()))} was predicted" in str(one)
    assert bytes_text(max(peak_bytes(pipeline()))) in str(one)
    assert "One step is predicted to take 100 ms" in str(report(a_plan(), None, None))


def test_a_window_of_several_steps_is_named_and_its_step_time_is_per_step():
    spans = [Span(0, "compute", "F", 0, m, m * 0.3, m * 0.3 + 0.2) for m in range(4)]
    spans += [Span(0, "update", "U", 0, t, t * 0.3 + 0.2, t * 0.3 + 0.3) for t in range(4)]
    one = report(None, None, Timeline.of(1, spans))
    assert "One step took 300 ms" in str(one)
    assert "a window of 4 steps, 1.20 s" in one.html
    assert "total of 4 steps" in one.html


def test_table_of_times_has_a_row_per_rank_and_kind_with_error():
    rows = [row.text for row in Tree(a_report().html).all("tr")]
    assert sum("F forward" in row for row in rows) == 3  # all, rank 0, rank 1
    assert any(row.startswith("rank 1F forward440.0044.00\u22129.1 %") for row in rows)
    assert sum("step total" in row for row in rows) == 3


def test_counts_that_differ_are_both_shown():
    page = report(None, pipeline(2, 3), pipeline(2, 4)).html
    assert "6 / 8" in Tree(page).text


def test_memory_has_a_curve_per_rank_and_the_cap():
    tree = Tree(a_report().html)
    charts = [c for c in tree.all("svg", "chart") if "Bytes held" in c.attributes["aria-label"]]
    assert len(charts) == 2
    assert all("cap 256 MiB" in chart.text for chart in charts)
    page = report(None, None, pipeline(), summary={"cap_bytes": [2**40, 2**40]}).html
    assert "cap 1.00 TiB, above the picture" in page


def test_loss_stands_beside_validation_and_what_the_job_reports_in_nats():
    tree = Tree(a_report().html)
    loss = next(
        c for c in tree.all("svg", "chart") if c.attributes["aria-label"].startswith("Loss")
    )
    assert "unigram entropy 3.5" in loss.text
    assert "validation 2.25" in loss.text
    assert "corpusstdlib" in tree.text


def test_long_run_is_thinned_to_the_pixels_and_keeps_its_peak():
    metrics = some_metrics(20_000)
    for line in metrics:
        line["loss"] = 3.0
    metrics[12_345]["loss"] = 7.0
    charts = Tree(a_report(metrics=metrics).html).all("svg", "chart")
    loss = next(c for c in charts if c.attributes["aria-label"].startswith("Loss"))
    curve = json.loads(loss.attributes["data-points"])["curves"][0]
    assert len(curve["x"]) <= 4 * 540
    assert (curve["x"][curve["y"].index(7.0)], max(curve["y"])) == (12_345, 7.0)


def test_plan_is_shown_with_its_reasons_and_as_text():
    text = Tree(a_report().html).text
    assert "scheduleone_f_one_bsearchsaves 31 ms over gpipe" in text
    assert str(a_plan()) in text
    assert "0at the inputno1blocks.1.1" in text


def test_slow_first_step_is_cut_off_and_said():
    metrics = some_metrics()
    metrics[0]["seconds"] = 60.0
    page = a_report(metrics=metrics).html
    assert "1 step above the picture, the slowest 60.0 s" in page
    charts = Tree(page).all("svg", "chart")
    seconds = next(c for c in charts if c.attributes["aria-label"].startswith("Seconds"))
    assert json.loads(seconds.attributes["data-points"])["scales"][1][1] == pytest.approx(0.6)
    assert "above the picture" not in a_report().html


def test_step_done_twice_counts_once():
    metrics = some_metrics(5)
    again = [{**metrics[3], "tokens_per_second": 9.0}, {**metrics[4], "tokens_per_second": 9.0}]
    assert "median of 5 steps" in a_report(metrics=metrics + again).html


# --- the wall time -----------------------------------------------------------------------------


def spent(num_ranks: int = 2, **more: float) -> Breakdown:
    """Return ten steps of `pipeline(slow=1.1)`, with more seconds in parts of rank 0."""
    once = breakdown_of(pipeline(num_ranks, slow=1.1))
    assert once is not None
    rows = [[10 * seconds for seconds in row] for row in once.seconds]
    for part, seconds in {"once": 3.0, **more}.items():
        rows[0][PARTS.index(part)] += seconds  # type: ignore[arg-type]
    return Breakdown(10, tuple(map(sum, rows)), tuple(map(tuple, rows)))


def walled(one: Breakdown, **changes: object) -> Report:
    return a_report(summary={**SUMMARY, "breakdown": one.to_json()}, **changes)


def bars(page: str) -> dict[str, float]:
    """Return the width of every box of the bars, by its tooltip."""
    found = re.findall(r'<g><title>(rank [^<]*)</title><rect [^>]*width="([\d.]+)"', page)
    return {words: float(width) for words, width in found}


def test_bars_are_as_long_as_the_parts_of_a_step():
    page = walled(spent(data=0.5)).html
    drawn = bars(page)
    assert drawn["rank 0, waiting for data: 50.0 ms measured"] == pytest.approx(
        drawn["rank 0, forward: 44.0 ms measured"] * 50 / 44, abs=0.02
    )
    assert drawn["rank 1, backward: 80.0 ms predicted"] == pytest.approx(
        drawn["rank 1, backward: 88.0 ms measured"] / 1.1, abs=0.02
    )
    widest = sum(w for words, w in drawn.items() if re.match("rank 0.*measured", words))
    assert widest == pytest.approx(wall.WIDTH - wall.LEFT - wall.RIGHT, abs=0.1)
    boxes = re.findall(
        r'<title>rank 0[^<]*measured</title><rect x="([\d.]+)".*?width="([\d.]+)"', page
    )
    starts, widths = zip(*(map(float, box) for box in boxes), strict=True)
    ends = itertools.accumulate(widths, initial=float(wall.LEFT))
    assert starts == pytest.approx(list(ends)[:-1], abs=0.1)
    assert "once" not in " ".join(drawn)
    assert "took 3.00 s for the first step" in Tree(page).text


def test_bottleneck_is_said_first_with_its_evidence_and_in_the_headline():
    one = walled(spent(data=1.0))
    text = Tree(one.html).text
    assert "Bottleneck: the loader, on rank 0: rank 0 waits 100 ms of every step for data" in text
    assert "What may help: make `data` faster" in text
    assert "Bottleneck: the loader, on rank 0." in str(one)
    healthy = walled(spent())
    assert "Bottleneck: none: a step takes" in Tree(healthy.html).text
    assert "Bottleneck" not in str(healthy)


def test_table_of_parts_has_means_shares_errors_and_the_rank_with_most():
    rows = [row.text for row in Tree(walled(spent(data=0.5)).html).all("tr")]
    assert "waiting for data\u201325.00\u201311.1 %50.00 on rank 0" in rows
    assert "forward40.0044.00\u22129.1 %19.6 %44.00 on rank 0" in rows
    assert any(row.startswith("a step159.00") for row in rows)


def test_bars_of_many_ranks_are_thinned_and_a_prediction_of_others_is_left_out():
    page = walled(spent(40)).html
    assert "32 of 40 ranks are drawn" in page
    assert len({words.split(",")[0] for words in bars(page)}) == 32
    assert "predicted" not in " ".join(bars(page))


def test_breakdown_of_a_run_in_python_is_shown():
    outcome = SimpleNamespace(
        timeline=pipeline(),
        steps=(),
        step_s=0.2,
        peak_bytes=(1, 1),
        breakdown=spent(data=0.5),
    )
    assert "Where the wall time went" in report_run(None, None, outcome).html
    outcome.breakdown = None
    assert "Where the wall time went" not in report_run(None, None, outcome).html


@pytest.mark.parametrize("content", [3, [], {"parts": []}, {**spent().to_json(), "wall_s": [1, 1]}])
def test_damaged_breakdown_is_refused(content):
    with pytest.raises(ReportError, match='"breakdown" of the summary is damaged') as caught:
        a_report(summary={"breakdown": content})
    assert caught.value.hint


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
    plan = Plan(
        **{
            **{name: getattr(a_plan(), name) for name in Plan.__dataclass_fields__},
            "cut_names": (HOSTILE,),
            "decisions": (Decision(HOSTILE, HOSTILE, "user", HOSTILE),),
        }
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
    assert len(named) == 6
    cells = [cell for cell in tree.all("td") if re.search(r"\d (ms|MiB|%)$", cell.text)]
    assert cells
    assert all(cell.attributes.get("class") == "n" for cell in cells if len(cell.text) < 12)


def test_every_file_that_is_not_python_is_in_the_package():
    root = Path(__file__).parents[1]
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

RECTANGLE = re.compile(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z")


def rectangles(page: str, clock: int, kind: str) -> list[tuple[float, float, float, float]]:
    """Return x, y, width, height of what is drawn of a kind by a clock."""
    paths = Tree(page).all("path", f"span {kind}")
    return [
        tuple(map(float, numbers))  # type: ignore[misc]
        for numbers in RECTANGLE.findall(paths[clock].attributes["d"] or "")
    ]


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
summaries = st.fixed_dictionaries(
    {},
    optional={
        "val_loss": number,
        "step_s_predicted": number,
        "step_s_measured": number,
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
    check_whole_or_refused("of the summary", summary=summary)


def check_whole_or_refused(place: str, **parts: object) -> None:
    refusals = list[ReportError]()
    try:
        Tree(report(None, None, None, **parts).html)  # type: ignore[arg-type]
    except ReportError as problem:
        refusals.append(problem)
    assert all(place in str(problem) and problem.hint for problem in refusals)


# --- the folder of a run -----------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "gpt"
    folder.mkdir()
    a_plan().save(folder / "plan.json")
    pipeline().save(folder / "predicted.trace.json")
    pipeline(slow=1.1).save(folder / "measured.trace.json")
    lines = "".join(json.dumps(line) + "\n" for line in some_metrics())
    (folder / "metrics.jsonl").write_text(lines)
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


def test_report_of_a_folder_is_the_report_of_its_parts(run_folder):
    assert report_of(run_folder).html == a_report(title="gpt").html


def test_eager_run_needs_neither_plan_nor_prediction(run_folder):
    (run_folder / "plan.json").unlink()
    (run_folder / "predicted.trace.json").unlink()
    assert "no predicted timeline" in report_of(run_folder).html


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("plan.json", PlanError),
        ("measured.trace.json", TimelineError),
        ("metrics.jsonl", ReportError),
        ("summary.json", ReportError),
    ],
)
def test_missing_part_is_an_error_that_names_it(run_folder, name, error):
    (run_folder / name).unlink()
    with pytest.raises(error, match=re.escape(str(run_folder / name))) as caught:
        report_of(run_folder)
    assert caught.value.hint


@pytest.mark.parametrize(
    "name",
    ["plan.json", "predicted.trace.json", "measured.trace.json", "metrics.jsonl", "summary.json"],
)
@pytest.mark.parametrize("content", [b'{"cut', b"\xff\xfe", b"[1, 2]", b"{}", b'"text"', b"3"])
def test_damaged_part_is_an_error_that_names_it(run_folder, name, content):
    if (name, content) == ("summary.json", b"{}"):
        return  # a summary without figures is one
    (run_folder / name).write_bytes(content)
    with pytest.raises(PenstockError, match=r"gpt") as caught:
        report_of(run_folder)
    assert caught.value.hint
    assert name.split(".")[0] in str(caught.value)


def test_damaged_line_of_the_metrics_is_named(run_folder):
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    (run_folder / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:-9]]))
    with pytest.raises(ReportError, match=r"line 4 of .*metrics\.jsonl"):
        report_of(run_folder)


def test_folder_that_holds_no_run_is_refused(tmp_path):
    for folder, what in ((tmp_path, "holds no run"), (tmp_path / "none", "is no folder")):
        with pytest.raises(ReportError, match=what) as caught:
            report_of(folder)
        assert "penstock train" in caught.value.hint


# --- colours -----------------------------------------------------------------------------------

CSS = (Path(lanes.__file__).parent / "page.css").read_text()
# Machado, Oliveira, Fernandes 2009: linear RGB as seen without one kind of cone.
VISION = {
    "all cones": np.eye(3),
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
LMS = np.array(
    [[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]
)
LAB = np.array(
    [[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45059], [0.02590, 0.78277, -0.80868]]
)


def colours(theme: str) -> dict[str, np.ndarray]:
    """Return the linear RGB of every colour of a theme, by name."""
    light, dark = CSS.split("prefers-color-scheme: dark")
    blocks = [light] if theme == "light" else [light, dark]
    found = [pair for block in blocks for pair in re.findall(r"--([\w-]+): #(\w{6})\b", block)]
    rgb = {name: np.array([int(h[k : k + 2], 16) / 255 for k in (0, 2, 4)]) for name, h in found}
    return {
        name: np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)
        for name, v in rgb.items()
    }


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    low, high = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISION)
def test_any_two_kinds_look_different_to_everyone(theme, vision):
    seen = {}
    for kind in SPAN_KINDS:
        linear = np.clip(np.array(VISION[vision]) @ colours(theme)[kind], 0, 1)
        seen[kind] = LAB @ np.cbrt(LMS @ linear)
    for a, b in itertools.combinations(SPAN_KINDS, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 0.13, (a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast(theme):
    found = colours(theme)
    for kind in "FBIWU":
        assert contrast(found[kind], found[f"on-{kind}"]) > 4.5, kind
    for text in ("ink", "soft", "cap", "given"):
        assert contrast(found[text], found["paper"]) > 4.5, text


# --- a real browser ----------------------------------------------------------------------------

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom"),
)

PROBE = """<script>addEventListener("load", () => setTimeout(async () => {
  const byId = (id) => document.getElementById(id), svg = byId("lanes"), tipBox = byId("tip");
  const all = (selector) => [...document.querySelectorAll(selector)];
  const rest = () => new Promise((done) => setTimeout(done, 30));
  const spans = () => all("g.spans path").map((path) => path.getAttribute("d"));
  const point = (type, x, y) => {
    const box = svg.getBoundingClientRect();
    const where = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
    svg.dispatchEvent(new PointerEvent(type, where));
  };
  const key = (name) => svg.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
  const tip = () => (tipBox.hidden ? null : tipBox.textContent);
  if (svg) svg.setPointerCapture = () => {}; // there is no such pointer
  const out = {};
  try { await (async () => { COMMANDS })(); } catch (problem) { out.problem = String(problem); }
  const result = document.createElement("pre");
  result.id = "probe";
  result.textContent = JSON.stringify(out);
  document.body.append(result);
}, 200));</script></body>"""


def browse(chromium: str, page: str, folder: Path, *flags: str) -> str:
    """Return the DOM of a page after its scripts have run; fails on any message of the console."""
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    command = [chromium, *FLAGS, f"--user-data-dir={folder / 'user'}", *flags, path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


def probe(chromium: str, page: str, folder: Path, commands: str, width: int = 1120) -> dict:
    """Return what `commands` leave in `out`, run in the page, its body `width` pixels wide.

    The content policy is taken out: it would forbid the probe.  Frames come at once, because a
    browser without a screen draws none.
    """
    page = re.sub(r"<meta http-equiv=[^>]*>", "", page)
    shim = "<script>window.requestAnimationFrame = (f) => setTimeout(f, 0)</script>"
    style = f"<style>body {{ max-width: none; width: {width}px; padding: 0; }}</style>"
    page = page.replace("</title>", f"</title>{shim}", 1).replace("</head>", f"{style}</head>", 1)
    page = page.replace("</body>", PROBE.replace("COMMANDS", commands))
    dom = browse(chromium, page, folder, "--window-size=1240,900")
    found = re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None
    out = json.loads(html.unescape(found[1]))
    assert "problem" not in out, out["problem"]
    return out


def test_browser_shows_the_page_without_a_message(chromium, tmp_path):
    dom = browse(chromium, walled(spent(data=0.5)).html, tmp_path)
    assert "One step took 200 ms" in dom
    assert '<svg viewBox="0 0 ' in dom
    assert 'class="live"' in dom  # the content policy lets the script run
    assert not re.search(r'<div class="buttons" hidden', dom)


def test_page_without_its_script_has_pictures_and_tables(chromium, tmp_path):
    script = Tree(a_report().html).all("script")[-1].text
    commands = """
      const width = (e) => Math.round(e.getBoundingClientRect().width);
      out.spans = all("path.span.F").map(width);
      out.curves = all("path.curve").map(width);
      out.rows = all("tr").length;
      out.buttons = width(document.querySelector(".buttons"));"""
    out = probe(chromium, a_report().html.replace(script, ""), tmp_path, commands)
    assert len(out["spans"]) == 2
    assert min(out["spans"]) > 300
    assert min(out["curves"]) > 15
    assert out["rows"] > 20
    assert out["buttons"] == 0


def numbers(paths: list[str]) -> Iterator[list[float]]:
    for path in paths:
        yield sorted(float(text) for text in re.findall(r"-?[\d.]+", path))


@pytest.mark.parametrize("micro_batches", [4, 200, 1500])
def test_script_draws_at_rest_what_the_static_picture_shows(chromium, tmp_path, micro_batches):
    page = report(None, pipeline(2, micro_batches), pipeline(2, micro_batches, slow=1.2)).html
    static = [p.attributes["d"] for p in Tree(page).all("path", "span")]
    commands = """
      out.paths = spans();
      out.labels = all("#names text").map((text) => text.textContent);
      out.grid = all("#grid text").map((text) => text.textContent);
      out.width = svg.viewBox.baseVal.width;"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["width"] == 1120
    assert out["labels"] == [t.text for t in Tree(page).all("text", "on")]
    grid = re.search(r'<g id="grid">(.*?)</g>', page)
    assert out["grid"] == re.findall(r">([^<]*)</text>", grid[1] if grid else "")
    for ours, theirs in zip(numbers(static), numbers(out["paths"]), strict=True):
        assert len(ours) == len(theirs)
        assert np.allclose(ours, theirs, atol=0.11)


def test_hover_names_the_action_and_its_counterpart(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    x, y, width, height = rectangles(page, 0, "F")[1]
    commands = f"""
      point("pointermove", {x + width / 2}, {y + height / 2}); out.tip = tip();
      out.marks = all(".mark").map((mark) => Number(mark.getAttribute("width")));
      point("pointermove", 600, {y + height / 2 - 40}); out.nothing = tip();"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["tip"].splitlines() == [
        "F0.1 (forward)",
        "rank 0, stage 0, micro-batch 1",
        "predicted: start 10.0 ms, length 10.0 ms",
        "measured: start 12.5 ms, length 12.5 ms, error \u221220.0 %",
    ]
    assert out["marks"][1] == pytest.approx(1.25 * out["marks"][0], abs=2)
    assert out["nothing"] is None


def test_drag_zooms_and_reset_returns(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    commands = """
      const before = String(spans()), shown = byId("shown");
      point("pointerdown", 76, 50); point("pointermove", 212, 50);
      out.selected = Number(byId("selection").getAttribute("width"));
      point("pointerup", 323, 50); await rest();
      out.zoomed = shown.textContent; out.first = spans()[0];
      document.querySelector("[data-do=out]").click(); await rest();
      out.wider = shown.textContent;
      key("0"); await rest();
      out.reset = shown.textContent; out.same = String(spans()) === before;"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["selected"] == pytest.approx(136, abs=1)
    whole_ms = 1000 * step_s(pipeline(slow=1.25))
    per_px = whole_ms / (lanes.WIDTH - lanes.LEFT - lanes.RIGHT)
    low, high = (float(t) for t in re.findall(r"[\d.]+", out["zoomed"]))
    assert (low, high) == pytest.approx((0, 136 * per_px), abs=1)
    first = [float(t) for t in RECTANGLE.findall(out["first"])[0]]
    assert first[2] == pytest.approx(1024 * 10 / (136 * per_px) - 1, rel=0.02)
    assert out["wider"] != out["zoomed"]
    assert (out["reset"], out["same"]) == ("", True)


def test_keys_go_from_span_to_span(chromium, tmp_path):
    page = report(None, pipeline(), pipeline(slow=1.25)).html
    commands = """
      const after = (name) => { key(name); return (tip() || "").split("\\n")[0]; };
      out.focusable = svg.tabIndex;
      out.path = ["Right", "Right", "Left", "Down", "Down"].map((way) => after("Arrow" + way));
      key("Escape"); out.gone = tip();"""
    out = probe(chromium, page, tmp_path, commands)
    assert out["focusable"] == 0
    names = ["F0.0 (forward)", "F0.1 (forward)", "F0.0 (forward)", "sent: result of F0.0 (forward)"]
    assert out["path"] == [*names, "received: result of B1.0 (backward)"]
    assert out["gone"] is None


def test_chart_tells_the_value_under_the_pointer(chromium, tmp_path):
    commands = """
      const chart = all(".chart").find((one) => one.ariaLabel.startsWith("Loss"));
      const box = chart.getBoundingClientRect();
      const where = { clientX: box.right - 15, clientY: box.top + 40 };
      chart.dispatchEvent(new PointerEvent("pointermove", where));
      out.tip = tip(); chart.dispatchEvent(new PointerEvent("pointerleave")); out.gone = tip();"""
    out = probe(chromium, a_report().html, tmp_path, commands)
    assert out["tip"].splitlines() == [
        "step 19",
        "loss 3.1",
        "unigram entropy 3.5",
        "validation 2.25",
    ]
    assert out["gone"] is None


def test_narrow_page_is_drawn_to_its_width_and_does_not_scroll_sideways(chromium, tmp_path):
    commands = """
      out.view = svg.viewBox.baseVal.width;
      out.overflow = all("main > *, main p, .charts, figure")
        .filter((part) => part.scrollWidth > 481).map((part) => part.tagName + part.className);"""
    out = probe(chromium, a_report().html, tmp_path, commands, width=480)
    assert out == {"view": 480, "overflow": []}
