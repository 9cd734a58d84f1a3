"""The table of instructions: what every row needs elsewhere to be seen."""

from pathlib import Path

import penstock
from penstock.program.instructions import TABLE
from penstock.report.figure_words import KIND_WORDS


def test_a_lane_is_shown_only_of_what_takes_time_or_moves():
    """The simulator has spans of what works, joins, sends and posts."""
    assert all(row.does != "drops" for row in TABLE if row.lane is not None)


def test_every_span_has_a_word_and_a_colour():
    page = (Path(penstock.__file__).parent / "report" / "page.css").read_text()
    for row in TABLE:
        if row.span is not None:
            assert row.span in KIND_WORDS
            assert f".{row.span} {{ fill: " in page
