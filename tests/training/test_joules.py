"""A run says what a step took in joules, where the machine tells, and else nothing of it."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

import penstock as ps
from penstock.gauge import joules
from penstock.gauge.joules import JouleMeter
from tests.parity.models import job_of


def ran(folder) -> tuple[dict, str]:
    job = replace(job_of("gpt", torch.float32, "adamw"), num_steps=4)
    given = {"stages": 1, "ranks": 1, "trial": False, "replan": False, "listener": None}
    trained = ps.train(job, out=folder, **given)
    assert trained is not None
    page = (folder / "report.html").read_text()
    return json.loads((folder / "summary.json").read_text()), page + str(trained)


def test_run_tells_of_the_joules_of_a_step(tmp_path, monkeypatch):
    """A meter that is asked once before the run and after each step, and has moved by 12 J."""
    clock = itertools.count(90, 12)
    meter = JouleMeter("a meter", lambda: float(next(clock) % 100), 100.0)
    monkeypatch.setattr(joules, "meters", lambda: [meter])
    summary, told = ran(tmp_path)
    assert summary["joules_per_step"] == pytest.approx(12.0)
    assert "Energy of a step" in told
    assert ", 12 J, " in told


def test_run_on_a_machine_that_tells_nothing_has_no_row_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(joules, "meters", list)
    summary, told = ran(tmp_path)
    assert "joules_per_step" not in summary
    assert "Energy" not in told


def test_hosts_of_which_others_have_ranks_too_are_not_counted(monkeypatch):
    from penstock.training.run_steps import joules_here

    meter = JouleMeter("a meter", lambda: 1.0, 100.0)
    monkeypatch.setattr(joules, "meters", lambda: [meter])
    assert joules_here().so_far() == 0.0
    for name, value in ("RANK", "0"), ("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "4"):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("MASTER_ADDR", "x")
    assert joules_here().so_far() is None
