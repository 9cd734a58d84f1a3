"""Docs: the examples of the pages about one noun each are what runs."""

import doctest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("page", ["job.md", "graph.md", "profile.md", "plan.md", "search.md"])
def test_examples_of_the_page_give_what_it_says(page, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # what they read
    monkeypatch.chdir(tmp_path)  # where they write
    path = str(ROOT / "docs" / page)
    result = doctest.testfile(path, module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.attempted > 0
    assert result.failed == 0
