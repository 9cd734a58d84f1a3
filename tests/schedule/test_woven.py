"""Woven units: two micro-batches in turn, by the definition; refused where there is no turn."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.schedule import SCHEDULES, Schedule, gpipe, one_f_one_b
from penstock.schedule.recipe import Recipe, as_cut, is_woven, to_json
from penstock.schedule.refine import refine
from tests.program.programs import random_schedule


def in_turn(words: list[str], units: list[int]) -> list[str]:
    """Return a rank's actions in units, those of neighbours in turn: the definition, as text."""

    def parts(word: str) -> list[str]:
        stage, number = map(int, word[1:].split("."))
        first = sum(units[:stage])
        own = [f"{word[0]}{first + unit}.{number}" for unit in range(units[stage])]
        return own if word[0] in "FU" else own[::-1]

    found: list[str] = []
    while words:
        one, *rest = words
        other = rest[0] if rest and "U" not in (one[0], rest[0][0]) else ""
        if not other or other.split(".")[1] == one.split(".")[1]:
            found, words = found + parts(one), rest
            continue
        pair = parts(one), parts(other)
        for at in range(max(map(len, pair))):
            found += [each[at] for each in pair if at < len(each)]
        words = rest[1:]
    return found


@st.composite
def of_one_rank(draw):
    """Return a schedule of one rank: of a builder, or a random one of several stages."""
    micro_batches, builder = draw(st.integers(1, 5)), draw(st.sampled_from([*SCHEDULES, None]))
    if builder is not None:
        return builder(1, micro_batches)
    chance = random.Random(draw(st.integers(0, 999)))
    return random_schedule(
        chance, draw(st.integers(1, 3)), micro_batches, 1, fixed=True, backward=True
    )


@given(of_one_rank(), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_units_of_neighbours_are_in_turn(schedule: Schedule, units: list[int]) -> None:
    units = units[: schedule.num_stages]
    if schedule.num_ranks > 1 or schedule.far:
        return
    made = refine(schedule, units, woven=True)
    text = str(schedule).splitlines()[1].split()[2:]
    assert str(made).splitlines()[1].split()[2:] == in_turn(text, units)
    assert sorted(str(made.orders).split()) == sorted(str(refine(schedule, units).orders).split())


def test_orders_in_the_docstring() -> None:
    made = refine(one_f_one_b(1, 2), (2,), woven=True)
    words = str(made).splitlines()[1].split()[2:]
    text = "F0.0 F1.0 (B1.0 F0.1) (B0.0 F1.1) B1.1 B0.1"
    assert words == text.replace("(", "").replace(")", "").split()
    assert text in refine.__globals__["__doc__"]
    assert made.name == "one_f_one_b / units 2 woven"


def test_several_ranks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="gpipe has 2 ranks, and is to be woven"):
        refine(gpipe(2, 2), (2, 2), woven=True)


def test_a_recipe_says_it_and_is_read_back() -> None:
    recipe = Recipe.parse("gpipe / units 3 woven")
    assert recipe == Recipe("gpipe", units=(3,), woven=True)
    assert is_woven(recipe)
    assert to_json(recipe) == recipe.name == "gpipe / units 3 woven"
    assert replace(recipe, woven=False).name == "gpipe / units 3"
    assert recipe.build(3, 4) == refine(gpipe(1, 4), (3,), woven=True)
    assert as_cut(Recipe("one_f_one_b"), recipe).name == "one_f_one_b / units 3 woven"
    with pytest.raises(ScheduleError, match="gpipe is woven without units"):
        Recipe("gpipe", woven=True)
