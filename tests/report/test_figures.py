"""The figures of a report are those of the timelines, the plan and the run."""

import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ReportError
from penstock.plan.tried import Tried
from penstock.report import report, wall
from penstock.report.charts import Axis, Curve, Level, chart
from penstock.report.figure_words import (
    bytes_text,
    seconds_text,
)
from penstock.report.prediction_table import compare
from penstock.report.run_report import report as report_run
from penstock.report.scale import PLAIN
from penstock.timeline import (
    Span,
    Timeline,
    busy_s,
    peak_bytes,
    step_s,
)
from tests.report.samples import Tree, a_plan, a_report, pipeline, some_metrics, spent, walled

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
    assert "validation loss is 2.25." in text
    assert "unigram" not in text
    cards = next(card.text for card in Tree(a_report().html).all("dl", "cards"))
    for figure in ("200 ms", "100 MiB", "39.1 % of 256 MiB", "2.25", "2,560", "180 ms"):
        assert figure in cards


def test_figures_missing_in_the_summary_come_from_timelines_and_plan():
    one = report(a_plan(), pipeline(), pipeline(slow=2))
    took, drawn = (seconds_text(step_s(pipeline(slow=slow))) for slow in (2, 1))
    assert f"One step took {took}; 100 ms was predicted" in str(one)  # as the plan says
    bare = report(None, pipeline(), pipeline(slow=2))
    assert f"One step took {took}; {drawn} was predicted" in str(bare)
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


def test_loss_stands_beside_validation_and_what_the_job_reports_is_folded():
    tree = Tree(a_report().html)
    loss = next(
        c for c in tree.all("svg", "chart") if c.attributes["aria-label"].startswith("Loss")
    )
    assert "unigram" not in loss.text
    assert "validation 2.25" in loss.text
    folded = "".join(each.text for each in tree.all("details"))
    assert "corpusstdlib" in folded
    assert "unigram_entropy_nats" in folded


TRIED = (Tried("one process", 1, 0.4, 2**28), Tried("pipeline of 3 stages", 3, 0.25, 2**26))


def test_total_time_and_speed_beside_others_stand_first():
    plan = a_plan()
    plan = replace(plan, predicted=replace(plan.predicted, tried=TRIED))
    metrics = [{"step": at, "loss": 1.0, "seconds": 0.2} for at in range(1, 11)]
    one = report(plan, pipeline(), pipeline(slow=2), metrics=metrics)
    tree = Tree(one.html)
    first = tree.all("dl", "cards")[0].text
    assert first.startswith("Total time2.00 sfor 10 steps")
    assert "predicted: 4.0x one process" in first
    rows = [row.text for row in tree.all("tr")]
    assert any(row.startswith("One process400 ms256 MiB") for row in rows)
    assert str(one).startswith("Pipeline of 2 stages on 2 processes")


def test_of_two_tables_of_time_the_second_is_folded():
    both = walled(spent()).html
    assert "Every kind of action" in "".join(each.text for each in Tree(both).all("details"))
    alone = a_report().html  # without a breakdown that is the one
    assert "Every kind of action" not in "".join(each.text for each in Tree(alone).all("details"))


@pytest.mark.parametrize("end", [2.2, 2.25, 2.3, 4.0])
def test_name_of_a_level_hides_no_curve_where_there_is_room(end):
    ys = np.linspace(5.0, end, 200)
    curve = Curve("loss", "measured", np.arange(200.0), ys)
    axes = Axis("step", PLAIN), Axis("", PLAIN)
    drawn = chart("", [curve], [Level("validation", "validation", 2.25)], x=axes[0], y=axes[1])
    name = next(each for each in Tree(drawn).all("text") if each.text.startswith("validation"))
    left, row = float(name.attributes["x"]), float(name.attributes["y"])
    long = 6.8 * len(name.text)
    left -= {"end": long, "middle": long / 2, "start": 0.0}[name.attributes["text-anchor"]]
    path = next(each for each in Tree(drawn).all("path", "curve")).attributes["d"]
    points = re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    inside = [
        (x, y)
        for x, y in points
        if left <= float(x) <= left + long and row - 11 <= float(y) <= row + 3
    ]
    assert inside == []


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
    assert any(row.startswith("a step, mean180.00") for row in rows)


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
