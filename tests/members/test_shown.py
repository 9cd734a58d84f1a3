"""Shown: what docs/elastic.md says is done to a run names tests that there are."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "elastic.md"
TESTS = Path(__file__).parents[1]
_HEADING = "## What is done to a run, and what happens"


def rows() -> list[list[str]]:
    """Return the cells of each row of the table."""
    section = DOCS.read_text().partition(_HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_each_row_names_tests_that_there_are() -> None:
    there = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(rows()) > 25
    for row in rows():
        assert len(row) == 3, row
        named = re.findall(r"`(test_\w+)`", row[2])
        assert named, row
        assert {*named} <= there, {*named} - there
