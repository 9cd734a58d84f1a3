"""Docs: the examples of pages that no room of its own tests are what runs."""

import doctest
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.estimate import load, predict, read
from penstock.estimate.columns import COLUMNS
from tests.test_layers import ROOMS, SRC

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    [
        "job.md",
        "shapes.md",
        "stores.md",
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
        "architecture.md",
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


def test_columns_that_the_page_on_estimates_lists_are_all_that_are_known():
    page = (ROOT / "docs" / "estimate.md").read_text()
    _, _, listed = page.partition("| column | taken as | says |\n| --- | --- | --- |\n")
    rows = [line.strip("| ").split(" | ") for line in listed.partition("\n\n")[0].splitlines()]
    known = [[f"`{c.name}`", c.default or "must be there", c.meaning] for c in COLUMNS]
    assert rows == known


def test_each_number_of_the_architecture_stands_in_the_file_that_the_page_names():
    page = (ROOT / "docs" / "architecture.md").read_text()
    told = [
        (int(number), file)
        for number, file in re.findall(r"^\*\*(\d+)\..*?\(`(.*?)`\)", page, re.M)
    ]
    marked = [
        (int(number), path.relative_to(SRC).as_posix())
        for path in SRC.rglob("*.py")
        for number in re.findall(r"# (\d+) in docs/architecture\.md", path.read_text())
    ]
    assert sorted(marked) == told
    picture = page.partition("```text\n")[2].partition("```")[0]
    assert [number for number, _ in told] == sorted(map(int, re.findall(r"\b\d+\b", picture)))


def test_rooms_of_the_architecture_stand_in_the_order_of_imports():
    page = (ROOT / "docs" / "architecture.md").read_text()
    listed = re.findall(r"^ (\w+)", page.partition("## The rooms")[2], re.M)
    rooms = [room for room in ROOMS if room in listed or (SRC / room).is_dir()]
    assert listed == rooms


def test_readme_prints_a_plan_and_saves_a_report(tmp_path):
    readme = (ROOT / "README.md").read_text()
    program = readme.partition("```python\n")[2].partition("```")[0]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "predicted: " in done.stdout
    assert "<svg" in (tmp_path / "report.html").read_text()
    for place in re.findall(r"\]\((docs/[^)]*)\)", readme):
        assert (ROOT / place).exists()


PAGES = [ROOT / "README.md", *sorted(ROOT.glob("C*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_page_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        place, _, anchor = target.partition("#")
        if not place.startswith("https:"):
            there = page.parent / place if place else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there.read_text()), target
    for bench in re.findall(r"python -m bench\.([a-z_]+)", text):
        assert (ROOT / "bench" / bench).is_dir() or (ROOT / "bench" / f"{bench}.py").exists()


def anchors(text):
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


READ_ALOUD = [
    "graph",
    "profile",
    "estimate",
    "schedule",
    "cluster",
    "timeline",
    "simulate",
    "fleet",
    "report",
]


@pytest.mark.parametrize("room", READ_ALOUD)
def test_docstrings_of_the_room_name_what_is_returned(room):
    """A docstring begins with a noun: "the seconds of a sum", not "what a sum takes"."""
    begins = re.compile(r'"""Return (what|which|how|those|of (which|what|how)|it)\b.*')
    for path in (SRC / room).rglob("*.py"):
        assert [found[0] for found in begins.finditer(path.read_text())] == [], path
