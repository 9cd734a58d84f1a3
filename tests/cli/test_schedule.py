"""penstock schedule: the list, the drawing and its JSON, and what is refused."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.schedule import build, in_blocks
from penstock.schedule import (
    SCHEDULES,
    SYNCHRONOUS,
    Schedule,
    bubble_fraction,
    find,
    num_messages,
    one_f_one_b,
    peak_activations,
    refine,
    steady_bubble_fraction,
    versions,
    weight_copies,
)
from penstock.schedule.recipe import Recipe
from tests.cli.conftest import Call
from tests.draws import examples

NAMES = [builder.__name__ for builder in SCHEDULES]


def test_list_as_json_is_the_names_alone(call: Call) -> None:
    done = call("schedule", "--json")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {"schedules": NAMES}


def long_run(name: str, stages: int, micro_batches: int) -> float:
    """Return the idle part of all ranks' time in a long run; about, of an asynchronous one.

    Such a one drains at the end alone: of 500 steps, that is little.
    """
    made = find(name)(stages, micro_batches)
    if made.weight_rule == SYNCHRONOUS:
        return steady_bubble_fraction(made)
    return bubble_fraction(find(name)(stages, micro_batches, num_steps=500))


def test_list_has_a_row_of_computed_figures_for_each_schedule(call: Call) -> None:
    done = call("schedule", "--stages", 3, "--micro-batches", 5)
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line.split()}
    for name in NAMES:
        made = find(name)(3, 5)
        row = rows[name]
        assert float(row[4]) / 100 == pytest.approx(long_run(name, 3, 5), abs=5e-3)
        figures = f"{100 * bubble_fraction(made):.1f} % {row[4]} %"
        ranks, alive = made.num_ranks, max(versions(made).alive)
        sent = num_messages(made) // made.num_steps
        counts = map(str, (max(peak_activations(made)), alive, sent))
        assert row[1:9] == [str(ranks), *figures.split(), *counts]


def test_schedule_is_drawn_into_an_svg_file(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "zb_v.svg"
    done = call("schedule", "zb_v", "--stages", 4, "--micro-batches", 3, "--svg", path)
    assert done.code == 0
    root = ElementTree.parse(path).getroot()
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert texts[0] == "zb_v: 4 stages, 3 micro-batches"
    assert [t for t in texts if t and t.startswith("rank")] == ["rank 0", "rank 1"]
    assert sum(t == "2" for t in texts) == 3 * 4  # F, I and W of each stage


def test_svg_of_no_schedule_in_particular_is_refused(call: Call, tmp_path: Path) -> None:
    done = call("schedule", "--svg", tmp_path / "all.svg")
    assert done.code == 2
    assert done.err.startswith("error: --svg draws one schedule")
    assert not (tmp_path / "all.svg").exists()


def test_list_is_of_four_stages_and_eight_micro_batches_unless_said_otherwise(call: Call) -> None:
    assert call("schedule").out == call("schedule", "--stages", 4, "--micro-batches", 8).out


@pytest.mark.parametrize("name", NAMES)
def test_json_of_one_holds_exactly_the_documented_keys(call: Call, name: str) -> None:
    done = call("schedule", name, "--stages", 3, "--micro-batches", 4, "--json")
    made, idle = find(name)(3, 4), long_run(name, 3, 4)
    work_s = 3 * 4 * (1 if name == "forward_only" else 3)
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == {
        "name": name,
        "stages": 3,
        "micro_batches": 4,
        "ranks": [[str(action) for action in order] for order in made.orders],
        "bubble_fraction": bubble_fraction(made),
        "steady_bubble_fraction": pytest.approx(idle, abs=5e-3),
        "steady_s": pytest.approx(work_s / (1 - idle) / made.num_ranks, rel=0.01),
        "peak_activations": list(peak_activations(made)),
        "weight_versions": list(versions(made).alive),
        "weight_copies": list(weight_copies(made)),
    }


def test_drawing_shows_the_picture_bubble_versions_and_activations(call: Call) -> None:
    lines = call("schedule", "zb_h1", "--stages", 3, "--micro-batches", 4).out.splitlines()
    assert "rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3" in lines
    assert "rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3" in lines
    assert "   1   2 s            3         1" in lines
    assert f"bubble: {100 * 6 / 42:.2f} % of all ranks' time" in lines
    assert f"in a long run without a barrier: {100 * 2 / 14:.2f} %, 14 s a step" in lines


def test_backward_is_drawn_twice_as_long_as_forward(call: Call) -> None:
    lines = call("schedule", "one_f_one_b", "--stages", 2, "--micro-batches", 2).out.splitlines()
    assert "rank 0  F0 F1 .  .  B0 -  .  B1 -" in lines
    assert "rank 1  .  F0 B0 -  F1 B1 -  .  ." in lines


def test_drawing_of_two_versions_says_so_for_each_rank(call: Call) -> None:
    done = call("schedule", "double_buffered", "--stages", 2, "--micro-batches", 2)
    rows = [line.split() for line in done.out.splitlines()]
    assert [row[-1] for row in rows if row[:1] in (["0"], ["1"])] == ["2", "2"]


def test_ranks_are_those_asked_for_where_stages_can_share_them(call: Call) -> None:
    done = call("schedule", "interleaved", "--stages", 6, "--ranks", 2, "--json")
    assert len(json.loads(done.out)["ranks"]) == 2


def test_many_ranks_are_not_drawn_but_their_figures_are_given(call: Call) -> None:
    done = call("schedule", "gpipe", "--stages", 65, "--micro-batches", 2)
    assert "no picture" in done.out
    assert "rank 0  F0" not in done.out
    assert "bubble: " in done.out


@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 6), st.integers(20, 100))
@examples(12)
def test_blocks_of_a_picture_fit_the_terminal_and_lose_no_cell(
    name: str, stages: int, micro_batches: int, columns: int
) -> None:
    from penstock.cli.schedule import picture

    drawn = picture(find(name)(stages, micro_batches))
    blocks = [block.splitlines() for block in in_blocks(drawn, columns)]
    for rank, line in enumerate(drawn.splitlines()):
        cells = [cell for block in blocks for cell in block[rank].split()[2:]]
        assert cells == line.split()[2:]
    assert all(len(line) <= columns for block in blocks for line in block)


# Refusals


@pytest.mark.parametrize(("typed", "meant"), [("zb_h3", "zb_h2"), ("1f1b", "one_f_one_b")])
def test_unknown_schedule_is_refused_with_all_names(call: Call, typed: str, meant: str) -> None:
    error, hint = call("schedule", typed).refusal(2)
    assert error == f"there is no schedule {typed!r}"
    assert meant in hint


def test_unknown_schedule_is_answered_with_the_nearest_one(call: Call) -> None:
    _, hint = call("schedule", "interleave").refusal(2)
    assert hint.startswith("did you mean interleaved?")


def test_number_of_ranks_that_the_schedule_does_not_have_is_refused(call: Call) -> None:
    error, hint = call("schedule", "gpipe", "--stages", 4, "--ranks", 3).refusal(2)
    assert error == "gpipe puts 4 stages on 4 ranks, not on 3"
    assert "--ranks" in hint


def test_sizes_that_no_memory_holds_are_refused_at_once(call: Call) -> None:
    sizes = "--stages", 10**6, "--micro-batches", 10**6
    error, _ = call("schedule", "gpipe", *sizes).refusal(2)
    assert "1000000 stages x 1000000 micro-batches" in error
    assert call("schedule", *sizes).code == 2


@pytest.mark.parametrize("flag", ["--stages", "--micro-batches", "--ranks"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", ""])
def test_size_that_is_no_whole_number_above_zero_is_refused(
    call: Call, flag: str, value: str
) -> None:
    error, hint = call("schedule", "gpipe", flag, value).refusal(2)
    assert flag in error
    assert hint == "`penstock schedule --help` shows what it takes"


def test_built_schedule_of_a_builder_without_ranks_is_the_builders_own() -> None:
    assert build(Recipe("gpipe"), 3, 4, 3) == find("gpipe")(3, 4)


def test_schedule_that_was_written_is_drawn_and_annealed_again(call: Call, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    assert call("schedule", "two_bp(limit=3)", "--stages", 3, "--out", mine).code == 0
    assert Schedule.load(mine) == find("two_bp")(3, 8, limit=3)
    shown = call("schedule", mine, "--json")
    assert (shown.code, json.loads(shown.out)["stages"]) == (0, 3)
    found = call("schedule", mine, "--find", "anneal", "--within", 0.1, "--json")
    assert (found.code, json.loads(found.out)["micro_batches"]) == (0, 8)
    mine.write_text("rank 0  F0.0 F0.0")
    error, _ = call("schedule", mine).refusal(2)
    assert "F0.0 stands twice" in error


def test_schedule_in_units_is_drawn_with_as_many_stages(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "cut.txt"
    name = "one_f_one_b / units 2 3"
    done = call("schedule", name, "--micro-batches", 2, "--out", out)
    assert done.code == 0, done.err
    assert done.out.startswith(f"{name}: 5 stages on 2 ranks, 2 micro-batches")
    assert Schedule.load(out) == refine(one_f_one_b(2, 2), (2, 3))
    done = call("schedule", name, "--stages", 4)
    assert (done.code, done.err.count("hint: ")) == (2, 1)
    assert "units 2 3 is of 5 stages, not of 4" in done.err


def test_arguments_may_have_a_point_and_are_not_taken_for_a_file(call: Call) -> None:
    name = "two_bp(batch=2)"
    told = call("schedule", name, "--stages", 2, "--micro-batches", 4).out
    assert "each W is of 2 micro-batches" in told
    assert "rank 1  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 -  W2 -" in told
    name = "pipemare(decay=0.5, warm_up_steps=2)"
    done = call("schedule", name, "--stages", 3, "--micro-batches", 2, "--json")
    assert (done.code, json.loads(done.out)["weight_copies"]) == (0, [2, 2, 1])
    done = call("schedule", "mine.txt")
    assert done.err.startswith("error: there is no schedule file mine.txt")
