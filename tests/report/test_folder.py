"""The report of a run's folder, whole or damaged."""

import json
import re
from pathlib import Path

import pytest

from penstock.errors import PenstockError, PlanError, ReportError, TimelineError
from penstock.report import report_of
from tests.report.samples import SUMMARY, a_plan, a_report, pipeline, some_metrics

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


@pytest.mark.parametrize("step_s", [-1, 1e16])
def test_time_that_no_step_takes_is_refused(run_folder, step_s):
    (run_folder / "summary.json").write_text(json.dumps({**SUMMARY, "step_s_measured": step_s}))
    with pytest.raises(ReportError, match="the summary is damaged: step_s_measured is") as caught:
        report_of(run_folder)
    assert caught.value.hint


def test_folder_that_holds_no_run_is_refused(tmp_path):
    for folder, what in ((tmp_path, "holds no run"), (tmp_path / "none", "is no folder")):
        with pytest.raises(ReportError, match=what) as caught:
            report_of(folder)
        assert "penstock train" in caught.value.hint
