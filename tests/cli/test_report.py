"""penstock report: the page of a run's folder, and what is refused."""

import json
from pathlib import Path

import pytest

from penstock.timeline import Span, Timeline
from tests.cli.conftest import Call


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return what `penstock train` leaves of a run of two steps that was not planned."""
    folder = tmp_path / "run"
    folder.mkdir()
    spans = [Span(0, "compute", "F", 0, 0, 0.0, 1.0), Span(0, "update", "U", 0, 0, 1.0, 1.5)]
    Timeline.of(1, spans).save(folder / "measured.trace.json")
    rows = [{"step": step, "loss": 1.0 / step, "seconds": 1.5} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "summary.json").write_text(json.dumps({"val_loss": 0.4, "step_s_measured": 1.5}))
    return folder


def test_report_writes_the_page_into_the_folder_and_prints_its_path(call: Call, run: Path) -> None:
    done = call("report", run)
    assert done == (0, f"{run / 'report.html'}\n", "")
    assert (run / "report.html").read_text().startswith("<!doctype html>")


def test_report_is_written_where_it_is_wanted(call: Call, run: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "a.html"
    done = call("report", run, "--out", page, "--json")
    assert json.loads(done.out)["report"] == str(page)
    assert page.exists()
    assert not (run / "report.html").exists()


def test_folder_that_does_not_exist_is_refused(call: Call, tmp_path: Path) -> None:
    error, hint = call("report", tmp_path / "nowhere").refusal(2)
    assert str(tmp_path / "nowhere") in error
    assert "penstock train" in hint
    assert list(tmp_path.iterdir()) == []


def test_folder_without_a_run_is_refused(call: Call, tmp_path: Path) -> None:
    error, _ = call("report", tmp_path).refusal(2)
    assert str(tmp_path) in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["measured.trace.json", "metrics.jsonl", "summary.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_damaged_file_of_a_run_is_refused_by_name(
    call: Call, run: Path, name: str, content: bytes
) -> None:
    (run / name).write_bytes(content)
    error, _ = call("report", run).refusal(2)
    assert name in error
    assert not (run / "report.html").exists()


def test_place_that_is_a_folder_is_refused(call: Call, run: Path, tmp_path: Path) -> None:
    error, _ = call("report", run, "--out", tmp_path).refusal(1)
    assert error == f"{tmp_path}: Is a directory"
