"""The bench of published figures: rows of zero bubble, and nothing that is worse than published."""

import pytest

from bench import published
from penstock.schedule import Seconds, one_f_one_b, zb_h2


@pytest.fixture(scope="module")
def rows():
    return list(published.rows())


def test_bubble_is_what_the_paper_counts():
    seconds = Seconds(2, 2, 1)
    assert published.bubble_of(one_f_one_b(3, 6), seconds) == round(1 - 30 / 40, 4)
    assert published.bubble_of(zb_h2(3, 6), seconds) == round(1 - 30 / 34, 4)


@pytest.mark.long
def test_every_model_of_the_paper_has_its_five_schedules(rows):
    for name in ("1.5B", "6.2B", "14.6B", "28.3B"):
        found = [r.schedule for r in rows if r.source == "paper" and r.case.startswith(f"{name} ")]
        assert found[:5] == ["one_f_one_b", "zb_h1", "zb_h2", "zb_greedy", "zb_greedy"]


@pytest.mark.long
def test_nothing_of_zero_bubble_is_worse_than_published(rows):
    names = ("one_f_one_b", "zb_h1", "zb_h2", "zb_v", "zb_greedy")
    worse = [row for row in rows if row.schedule in names and row.ours > row.published]
    assert worse == []
