"""Docs: the examples of pages that no room of its own tests are what runs."""

import doctest
import re
from pathlib import Path

import pytest

from penstock.estimate import load, predict, read
from penstock.estimate.layouts import LAYOUTS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "job.md",
        "examine.md",
        "graph.md",
        "profile.md",
        "plan.md",
        "search.md",
        "prove.md",
        "precision.md",
        "wire.md",
        "rules.md",
        "explain.md",
        "compiled.md",
        "infer.md",
        "volatile.md",
    ],
)
def test_examples_of_the_page_give_what_it_says(page, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # what they read
    monkeypatch.chdir(tmp_path)  # where they write
    path = str(ROOT / "docs" / page)
    result = doctest.testfile(path, module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0


def test_table_in_the_page_on_estimates_can_be_predicted(tmp_path):
    page = (ROOT / "docs" / "estimate.md").read_text()
    (tmp_path / "runs.csv").write_text(page.partition("```csv\n")[2].partition("```")[0])
    (sample,) = read(tmp_path / "runs.csv").samples
    (estimate,) = predict("time", [sample.run], load())
    assert sample.seconds == 0.3
    assert estimate.low < estimate.value < estimate.high


def test_columns_that_the_page_on_estimates_lists_are_those_of_each_layout():
    page = (ROOT / "docs" / "estimate.md").read_text()
    _, _, listed = page.partition("| layout | columns |\n| --- | --- |\n")
    rows = dict(row.strip("| ").split(" | ", 1) for row in listed.partition("\n\n")[0].splitlines())
    assert list(rows) == [layout.name for layout in LAYOUTS]
    for layout in LAYOUTS:
        assert layout.columns <= set(re.findall("`([^`]*)`", rows[layout.name]))
