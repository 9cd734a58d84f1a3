"""bench.gpu.all: what becomes of a line that is right, wrong, broken or too late."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.gpu import all as bench
from bench.gpu.all import LINES, Result, judgement_in, page, run_line

OVERLAP = next(line for line in LINES if line.name == "overlap")
FIGURES = {"products_s": 1.0, "copy_s": 0.9, "both_s": 1.1, "judged": True}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what the process of a line is to give."""
    done = SimpleNamespace(code=0, said="a warning\n" + json.dumps(FIGURES))
    monkeypatch.setattr(bench, "_over", lambda asked, limit_s: (done.code, done.said, "why"))
    return done


def test_line_passes_by_its_figures(process) -> None:
    found = run_line(OVERLAP, small=True, left_s=60.0)
    assert (found.state, found.wrong, found.figures) == ("pass", (), FIGURES)
    process.said = json.dumps({**FIGURES, "both_s": 1.9})
    (why,) = run_line(OVERLAP, small=True, left_s=60.0).wrong
    assert why == "1.9000 s at once, the longer alone 1.0000 s"
    process.said = json.dumps({**FIGURES, "both_s": 1.9, "judged": False})
    assert run_line(OVERLAP, small=True, left_s=60.0).state == "pass"


def test_line_that_breaks_fails(process) -> None:
    process.code = 1
    assert run_line(OVERLAP, small=True, left_s=60.0).wrong == ("why",)


def test_what_comes_late_ends_with_all_that_it_began() -> None:
    """The shell has begun another program, which holds the same pipe."""
    assert bench._over(["sh", "-c", "sleep 100 & sleep 100"], 0.1)[::2] == (1, "not over after 0 s")
    assert bench._over(["sh", "-c", "echo x; echo y >&2; exit 3"], 60.0) == (3, "x\n", "y\n")


def test_every_line_says_what_is_wrong() -> None:
    waits = {"syncs": 2, "pageable": 1, "live_bytes": 103, "held_bytes": 100}
    assert len(bench.wrong_waits(waits)) == 3
    assert bench.wrong_waits({"syncs": 1, "pageable": 0, "live_bytes": 0, "held_bytes": 0}) == []
    row = {"way": "whole", "peer": "loop", "ours_s": 1.0, "predicted_s": 1.0, "ratio": 1.0}
    row |= {"ours_bytes": 100, "predicted_bytes": 100}
    worse = {**row, "ratio": 1.1, "predicted_s": 2.0, "ours_bytes": 200}
    assert bench.wrong_speed({"rows": [row], "judged": True}) == []
    assert len(bench.wrong_speed({"rows": [worse], "judged": True})) == 3
    assert len(bench.wrong_speed({"rows": [worse], "judged": False})) == 1
    assert bench.wrong_memory({"rows": [{"way": "a", "ours": 2, "peer": 4}]}) != []
    proof = next(line for line in LINES if line.name == "proof of plain")
    assert proof.wrong({"code": 0, "said": "equal to the plain loop", "tail": ""}) == []
    assert proof.wrong({"code": 0, "said": "", "tail": "no plan"}) != []
    untraced = next(line for line in LINES if line.name == "proof of untraced")
    assert untraced.wrong({"code": 0, "said": "", "tail": ""}) == []


def test_page_has_a_row_for_each_line_and_what_was_not_run(monkeypatch, tmp_path: Path) -> None:
    results = [
        Result("a", "pass", (), 1.0, {"x": 1}),
        Result("b", "fail", ("one | two\n", "three"), 2.0, {}),
    ]
    shown = page(results, {"device": "GPU", "torch": "2"})
    assert "GPU, torch 2: 1 pass, 1 fail, 0 not run." in shown
    assert "| b | fail | 2 s | one / two ; three |" in shown
    monkeypatch.setattr(bench, "LINES", (replace(OVERLAP, name="overlap"),))
    monkeypatch.setattr(bench, "LIMIT_S", 0.0)
    assert bench.everything(tmp_path / "gpu", (), small=True) == 0
    rows = json.loads((tmp_path / "gpu" / "gpu.json").read_text())["lines"]
    assert [(row["name"], row["state"]) for row in rows] == [("overlap", "not run")]


def test_judgement_is_the_line_that_says_how_steps_compare() -> None:
    """What is being done is said before, and that sums in codes are not the plain loop's steps."""
    before = (
        "  sums: int8; steps are not those of a plain loop\ncomparing with the plain loop ...\n"
    )
    equal = "equal to the plain loop at step 1: data equal"
    assert judgement_in(f"{before}{equal}\nvalidating ...") == equal
    assert judgement_in(before) == "comparing with the plain loop ..."
    assert judgement_in("error: none") == ""
