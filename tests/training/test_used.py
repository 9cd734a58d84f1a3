"""What ranks hold is told by what it is for, far memory as it was predicted, FLOP/s as counted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from tests.parity.models import job_of

WAYS = {
    "all": {"stages": 1, "ranks": 1, "units": "2", "offload": "all"},
    "activations of a pipeline": {"stages": 2, "ranks": 2, "offload": "activations"},
    "nothing": {"stages": 1, "ranks": 1},
}


@pytest.fixture(scope="module", params=WAYS)
def run(request, tmp_path_factory) -> tuple[str, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("used")
    job = replace(job_of("gpt", torch.float32, "adamw"), num_steps=4)
    asked = WAYS[request.param] | {"out": folder, "trial": False, "listener": None}
    trained = ps.train(job, replan=False, **asked)
    assert trained is not None
    return request.param, json.loads((folder / "summary.json").read_text()), folder


def test_far_memory_is_as_large_as_predicted(run):
    name, summary, _ = run
    if name == "nothing":
        assert "far_bytes_measured" not in summary
    else:
        assert summary["far_bytes_measured"][0] > 0
        pairs = zip(summary["far_bytes_predicted"], summary["far_bytes_measured"], strict=True)
        for predicted, measured in pairs:  # blocks begin at cache lines, rooms at pages
            assert 0.97 * measured <= predicted <= measured


def test_peak_is_what_its_parts_are_together(run):
    name, summary, _ = run
    for held, peak in zip(summary["held_bytes"], summary["peak_bytes_measured"], strict=True):
        assert sum(held.values()) == peak
        assert held["activations"] > 0
        near = held["weights"] > 0 and held["optimizer"] >= 2 * held["gradients"] > 0
        assert near == (name != "all")


def test_flop_per_second_are_the_models_by_the_steps_time(run):
    _, summary, folder = run
    graph = json.loads((folder / "graph.json").read_text())
    place = graph["columns"].index("flop")
    flop = sum(row[place] for row in graph["nodes"])
    plan = ps.Plan.load(folder / "plan.json")
    expected = flop * plan.step_micro_batches / summary["step_s_measured"]
    assert summary["flop_per_s"] == pytest.approx(expected)
    assert summary["mfu"] == pytest.approx(expected / summary["flop_per_s_of_devices"])


def test_page_shows_all_of_it(run):
    name, _, folder = run
    page = (folder / "report.html").read_text()
    assert "Model FLOP/s" in page
    assert "MFU" in page
    assert "Measured peak by what it is for" in page
    assert ("pinned in the host" in page) == (name != "nothing")
