"""A run until a loss: what it says in the end, and where else that is told."""

import json
from pathlib import Path

import pytest

from penstock.errors import PlanError, ReportError
from penstock.files import write_text
from penstock.pilot.phases import ChosenBatch, TrainedPhase, UntilFile, figures_of, until_in
from penstock.report.phase_table import told_in
from penstock.training import until_loss
from tests.cli.conftest import Call

JOBS = f"{Path(__file__).parent / 'mlp.py'}"


def test_loss_that_is_not_reached_is_an_error_after_all_files(call: Call, tmp_path, monkeypatch):
    monkeypatch.setattr(until_loss, "_FEWEST", 2)
    monkeypatch.setattr(until_loss, "_MOST", 2)
    monkeypatch.setattr(until_loss, "_SEARCH_S", 0.2)
    folder = tmp_path / "run"
    asked = (
        "train",
        f"{JOBS}:job",
        "--set",
        "until_loss=1e-6",
        "--set",
        "objective=cost",
        "--ranks",
        "1",
    )
    done = call(
        *asked, "--steps", "8", "--set", "check=false", "--set", "trial=false", "--out", folder
    )
    assert done.code == 1
    assert "not 1e-06" in done.err
    assert "hint: --steps N --resume goes on" in done.err
    assert "phase 1   1 rank, 4 micro-batches a step" in done.err
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["until"]["reached"] is False
    assert summary["until"]["least"] == "cost"
    phases = summary["until"]["phases"]
    assert [row["step"] for row in phases] == [0, *(r["step"] + r["steps"] for r in phases[:-1])]
    assert "To the loss" in (folder / "report.html").read_text()
    explained = call("explain", folder)
    assert explained.code == 0
    assert "until the training loss is 1e-06, with least cost" in explained.out
    told = json.loads(call("explain", folder, "--json").out)
    assert told["until"]["phases"] == phases


def test_flags_that_do_not_go_together_are_refused(call: Call, tmp_path):
    asked = "train", f"{JOBS}:job", "--out", tmp_path / "run"
    error, hint = call(*asked, "--set", "objective=cost").refusal(2)
    assert "objective cost" in error
    assert "--set until_loss=2.1" in hint
    assert "no loss" in call(*asked, "--set", "until_loss=nan").refusal(2)[0]


def file_of() -> UntilFile:
    chosen = ChosenBatch(1, 8, None, (0.1, 0.2, 0.3), 1.0, None, None, None, "why")
    phase = TrainedPhase(0, 0, 0.0, 1, 4, steps=3, step_s=1.0)
    return UntilFile(1.0, "time", "training", 4, 4, 0.0, 1.0, (phase,), chosen)


def test_phases_are_written_and_read_back(tmp_path):
    told = file_of()
    told.save(tmp_path)
    assert until_in(tmp_path) == told
    assert until_in(tmp_path / "other") is None


@pytest.mark.parametrize("wrong", [{"phases": 3}, {"samples": "a"}, {"more": 1}])
def test_damaged_phases_are_refused_by_name(tmp_path, wrong):
    file_of().save(tmp_path)
    content = json.loads((tmp_path / "phases.json").read_text())
    write_text(tmp_path / "phases.json", json.dumps(content | wrong))
    with pytest.raises(PlanError, match=r"phases.json.*" + next(iter(wrong))):
        until_in(tmp_path)


def test_page_refuses_phases_that_are_damaged():
    content = figures_of(file_of())
    told = told_in(content)
    assert told is not None
    assert told[1][0].micro_batches == 4
    assert told_in(None) is None
    with pytest.raises(ReportError, match="micro_batches"):
        told_in({**content, "phases": [{**content["phases"][0], "micro_batches": "a"}]})
