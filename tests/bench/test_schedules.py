"""The bench of schedules: figures that are known, and a picture that is one."""

import xml.etree.ElementTree

import pytest

from bench.schedule_picture import Point, picture
from bench.schedules import Row, on_ranks, points, row
from penstock.schedule import SCHEDULES, find


def figures(name, ranks, micro_batches, message_s=0.0):
    return row(on_ranks(find(name), ranks, micro_batches, message_s), message_s)


def test_figures_of_1f1b_are_the_known_ones():
    found = figures("one_f_one_b", 4, 8)
    assert found == Row(
        "one_f_one_b", 4, 4, 8, "free", 33.0, 33.0, pytest.approx(3 / 11), 1.0, 1, 1.0, 48
    )


def test_two_stages_per_rank_count_half_each():
    found = figures("zb_v", 4, 8)
    assert (found.ranks, found.stages) == (4, 8)
    assert found.step == 3 * 8 + 0.5 * (4 - 1)
    assert found.peak_activations == 1.0
    assert figures("hanayo", 4, 8).messages == 2 * 8 * 6  # of 7 places between stages, 1 is a turn


def test_stages_that_live_twice_hold_their_weights_twice():
    assert [figures(name, 4, 8).weight_copies for name in ("chimera", "zb_v")] == [2.0, 1.0]


@pytest.mark.parametrize("builder", SCHEDULES, ids=lambda builder: builder.__name__)
def test_every_schedule_has_figures_and_messages_take_time(builder):
    free, linked = (figures(builder.__name__, 4, 4, message_s) for message_s in (0.0, 0.2))
    assert (free.ranks, free.links, linked.links) == (4, "free", "0.2 s")
    assert linked.step > free.step > 0
    assert 0 <= free.bubble_fraction < linked.bubble_fraction < 1


def test_picture_shows_every_schedule_and_joins_those_that_none_beats():
    some = [
        Point("slow", 9.0, 1.0, False),
        Point("fast", 7.0, 2.0, True),
        Point("bad", 9.0, 2.0, False),
    ]
    drawn = xml.etree.ElementTree.fromstring(picture("title", [("free", some)], ideal_s=6.0))
    space = "{http://www.w3.org/2000/svg}"
    words = {text.text for text in drawn.iter(f"{space}text")}
    assert {"slow", "fast", "bad", "free"} <= words
    (line,) = drawn.iter(f"{space}polyline")
    assert len(line.get("points").split()) == 2
    assert [dot.get("fill") for dot in drawn.iter(f"{space}circle")].count("white") == 1


def test_only_schedules_that_train_in_one_step_are_pictured():
    made = [figures(name, 8, 16) for name in ("gpipe", "forward_only", "double_buffered")]
    assert [point.name for point in points(made, "free")] == ["gpipe"]
