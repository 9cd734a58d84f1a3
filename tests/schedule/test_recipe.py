"""Recipes: a builder with all its arguments, or a schedule itself, told, read back and built."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import (
    SCHEDULES,
    Schedule,
    Seconds,
    find,
    gpipe,
    refine,
    steady_s,
    two_bp,
    zb_greedy,
)
from penstock.schedule.recipe import (
    Recipe,
    any_schedule,
    built,
    from_json,
    name_of,
    refined,
    to_json,
    words_of,
)
from penstock.typed import MisfitError

ARGUMENTS = {
    "dapple": {"policy": ["A", "B"], "ranks": [2, "2-2", "2+1"]},
    "interleaved": {"group": [2]},
    "chimera": {"pipelines": [2]},
    "hanayo": {"waves": [1, 2]},
    "round_robin": {"ranks": ["2-3", 3], "depth": ["noam", "full"]},
    "pipemare": {"decay": [0.5, 0.0625], "rescale_steps": [0, 7], "warm_up_steps": [3]},
    "zb_greedy": {"limit": [4, 9], "weight_share": [0.5, 1.0]},
    "two_bp": {"limit": [5]},
    "list_schedule": {"limit": [8], "placement": ["loop", "wave"]},
}
TAKERS = "zb_greedy", "zb_v", "list_schedule"
times = st.floats(0, 10, allow_nan=False)


@st.composite
def recipes(draw, num_stages: int = 4):
    """Return any recipe for so many stages."""
    builder = draw(st.sampled_from([make.__name__ for make in SCHEDULES]))
    given_to = draw(st.sets(st.sampled_from([*ARGUMENTS.get(builder, {"": ()})])))
    arguments = [(n, draw(st.sampled_from(ARGUMENTS[builder][n]))) for n in given_to - {""}]
    row = st.lists(times, min_size=num_stages, max_size=num_stages) | times
    link, own = (st.lists(times, min_size=n, max_size=n) for n in (num_stages - 1, num_stages))
    empty = st.just(())
    more = (empty | link, empty | link, empty | own) if builder == "list_schedule" else [empty] * 3
    seconds = draw(st.none() | st.builds(Seconds, row, row, row, times, *more))
    return Recipe(builder, tuple(arguments), seconds if builder in TAKERS else None)


@given(recipes(), st.integers(4, 6))
def test_recipe_is_read_back_and_builds_what_its_builder_builds(recipe: Recipe, count: int) -> None:
    again = from_json(json.loads(json.dumps(to_json(recipe))))
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert Recipe.parse(recipe.name).arguments == recipe.arguments
    assert str(recipe).startswith(recipe.name)
    more = {} if recipe.seconds is None else {"seconds": recipe.seconds}
    expected = find(recipe.builder)(4, count, **dict(recipe.arguments), **more)
    assert recipe.build(4, count) == built(again, 4, count) == expected


def test_ranks_and_steps_are_those_of_the_plan_where_the_builder_takes_them() -> None:
    assert Recipe("interleaved").build(4, 2, num_ranks=1).num_ranks == 1
    assert Recipe("gpipe").build(4, 2, num_ranks=1).num_ranks == 4
    assert Recipe("pipedream").build(2, 2, num_steps=3).num_steps == 3
    assert Recipe("gpipe").build(2, 2, num_steps=3).num_steps == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpip", "there is no schedule 'gpip'"),
        ("two_bp(limit=4", r"there is no schedule 'two_bp\(limit=4'"),
        ("two_bp(limit)", "'limit' is no argument of two_bp"),
        ("two_bp(lim=4)", "two_bp has no argument 'lim'"),
        ("two_bp(limit=x)", "two_bp: limit is 'x', not a whole number"),
        ("dapple(policy=C)", "dapple: policy is 'C', not one of A, B"),
        ("interleaved(num_ranks=2)", "interleaved has no argument 'num_ranks'"),
        ("zb_greedy(seconds=2)", "zb_greedy has no argument 'seconds'"),
        ("two_bp(limit=4, limit=5)", "'limit' of two_bp stands twice"),
    ],
)
def test_text_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        Recipe.parse(text)
    assert caught.value.hint


def test_seconds_are_of_builders_that_take_them_and_are_numbers_of_each_stage() -> None:
    with pytest.raises(ScheduleError, match="gpipe is not made for seconds"):
        Recipe("gpipe", seconds=Seconds())
    for wrong in (Seconds(-1.0), Seconds(float("inf")), Seconds(message_s=(1.0, 2.0))):
        with pytest.raises(ScheduleError, match="_s is "):
            Recipe("zb_greedy", seconds=wrong)
    three = Recipe("zb_greedy", seconds=Seconds((1, 2, 3), 1.0, [1, 2, 3]))
    three.check(3)
    with pytest.raises(ScheduleError, match="for 4 stages"):
        three.check(4)
    assert str(three).endswith("for F 1000 2000 3000 ms, I 1000 ms, W 1000 2000 3000 ms")


def test_schedule_stands_for_itself_and_for_no_other_sizes() -> None:
    schedule = gpipe(2, 3)
    assert any_schedule(schedule) is schedule
    assert built(schedule, 2, 3) is schedule
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule
    with pytest.raises(ScheduleError, match="is of 2 stages and 3 micro-batches on 2 ranks, not"):
        built(schedule, 2, 4)
    with pytest.raises(ScheduleError, match="not of 2 stages and 3 micro-batches on 1 ranks"):
        built(schedule, 2, 3, num_ranks=1)


def test_words_tell_two_schedules_of_one_name_apart() -> None:
    first = Schedule.parse("rank 0  F0.0 F0.1 B0.0 B0.1")
    other = Schedule.parse("rank 0  F0.0 F0.1 B0.1 B0.0")
    assert name_of(first) == "a written schedule"
    assert words_of(first) != words_of(other)
    assert words_of(Recipe("two_bp", (("limit", 3),))) == "two_bp(limit=3)"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, ScheduleError, "schedule is None"),
        ({}, ScheduleError, "name is missing"),
        ({"builder": "zb_greedy"}, MisfitError, "seconds is missing"),
        (
            {"builder": "zb_greedy", "seconds": {"forward_s": 1}},
            MisfitError,
            r"seconds\.input_s is missing",
        ),
        ("fast", ScheduleError, "there is no schedule 'fast'"),
    ],
)
def test_what_is_no_schedule_is_refused(content, error, message: str) -> None:
    with pytest.raises(error, match=message):
        from_json(content)


def test_file_of_a_schedule_is_read_in_each_of_its_forms(tmp_path) -> None:
    made, path = two_bp(2, 2), tmp_path / "file"
    rows = "0F0,0F1,,0I0,0I1,0W0,0W1\n,1F0,1I0,1F1,1I1,1W0,1W1\n"
    for text in (json.dumps(made.to_json()), str(made), f"# mine\n{made.orders}", rows):
        path.write_text(text)
        assert Schedule.load(path).num_micro_batches == 2
    path.write_text(str(made))
    assert Schedule.load(path) == made
    assert str(Schedule.parse_torch_csv(rows).orders).count("I") == 4
    for wrong in ("", "F0.0 B0.0", "rank 0  B0.0"):
        path.write_text(wrong)
        with pytest.raises(ScheduleError, match=f"schedule {path}: ") as caught:
            Schedule.load(path)
        assert caught.value.hint
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="is not text"):
        Schedule.load(path)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_built_for_seconds_is_no_longer_than_for_equal_ones(num_stages, count, data) -> None:
    """In a long run, which is what the builders aim at."""
    row = st.lists(st.integers(1, 9), min_size=num_stages, max_size=num_stages)
    f, i, w = (data.draw(row) for _ in range(3))
    seconds = Seconds(f, i, w)
    for name in ("zb_greedy", "zb_v"):  # one stage on each rank, and two
        ours = Recipe(name, seconds=seconds).build(num_stages, count)
        alike = Recipe(name).build(num_stages, count)
        assert steady_s(ours, seconds) <= steady_s(alike, seconds) * (1 + 1e-12)


def test_nor_where_a_search_for_these_seconds_ends_above_the_one_for_equal_ones() -> None:
    f, i, w = (6, 5, 4, 6, 6, 4, 6, 5), (5, 6, 5, 5, 5, 5, 5, 5), (6, 4, 5, 5, 5, 5, 6, 5)
    seconds = Seconds(f, i, w)
    ours = steady_s(zb_greedy(8, 11, seconds=seconds), seconds)
    assert ours <= steady_s(zb_greedy(8, 11), seconds)


def test_zb_greedy_takes_the_seconds() -> None:
    seconds = Seconds(1.0, 3.0, 1.0)
    assert zb_greedy(4, 8, seconds=seconds, limit=8) != zb_greedy(4, 8, limit=8)


@given(recipes(), st.lists(st.integers(1, 3), min_size=4, max_size=4), st.integers(4, 6))
def test_recipe_of_units_refines_what_its_builder_builds(
    recipe: Recipe, units: list[int], count: int
) -> None:
    cut = recipe.refined(units)
    assert Recipe.parse(cut.name) == replace(cut, seconds=None)
    assert from_json(json.loads(json.dumps(to_json(cut)))) == cut
    expected = refine(recipe.build(4, count), units)
    assert cut.build(sum(units), count) == expected == refined(expected, (1,) * sum(units))
    again = [1 + place % 2 for place in range(sum(units))]
    assert cut.refined(again).build(sum(again), count).orders == refine(expected, again).orders


def test_recipe_of_units_is_of_as_many_stages_and_tells_them() -> None:
    cut = Recipe.parse("two_bp(limit=4) / units 2 3")
    assert cut == Recipe("two_bp", (("limit", 4),), units=(2, 3))
    assert str(cut) == to_json(cut) == "two_bp(limit=4) / units 2 3"
    with pytest.raises(ScheduleError, match="units 2 3 is of 5 stages, not of 4"):
        cut.build(4, 2)
    with pytest.raises(ScheduleError, match="units are 2 0"):
        Recipe("gpipe", units=(2, 0))
    with pytest.raises(ScheduleError, match="for 3 stages"):  # seconds are of the builder's stages
        Recipe("zb_greedy", seconds=Seconds((1, 2), 1, 1), units=(2, 2, 2)).build(6, 2)


def test_pipemares_own_numbers_are_in_the_name_of_its_rule_and_read_back() -> None:
    made = Recipe.parse("pipemare(decay=0.5, rescale_steps=7, warm_up_steps=3)").build(3, 2)
    rule = made.weight_rule
    assert (rule.decay, rule.rescale_steps, rule.warm_up_steps) == (0.5, 7, 3)
    assert rule.name == "discrepancy:0.5,7,3"
    assert Schedule.parse(str(made)).weight_rule == rule
    assert refine(made, (1, 2, 1)).weight_rule.decay == 0.5
    assert Schedule.parse(str(refine(made, (1, 2, 1)))) == refine(made, (1, 2, 1))
    whole = Recipe.parse("pipemare(decay=0)").build(3, 2)
    assert Schedule.parse(str(whole)).weight_rule == whole.weight_rule
    usual = Recipe.parse("pipemare(decay=0.135)").build(3, 2)
    assert usual == find("pipemare")(3, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("pipemare(decay=1.5)", "decay is 1.5"),
        ("pipemare(warm_up_steps=-1)", "warm_up_steps -1"),
        ("pipemare(rescale_steps=0.5)", "rescale_steps is 0.5, not a whole number"),
    ],
)
def test_numbers_that_pipemare_cannot_have_are_refused(text: str, why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        Recipe.parse(text).build(3, 2)
