"""Refined schedules: every action is its units, in order or back, and nothing else changes."""

import inspect
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.program.lower import lower
from penstock.program.program import Program
from penstock.schedule import (
    SCHEDULES,
    SYNCHRONOUS,
    WEIGHT_RULES,
    Schedule,
    num_messages,
    one_f_one_b,
    peak_activations,
    refine,
    versions,
    weight_copies,
)
from penstock.schedule.asynchronous import ASYNCHRONOUS
from penstock.schedule.weight_rule import rule_named
from tests.program.programs import random_schedule

sizes = st.tuples(st.integers(1, 4), st.integers(1, 4))
counts = st.lists(st.integers(1, 4), min_size=4, max_size=4)


def expanded(words: str, units: list[int]) -> str:
    """Return a rank's actions with each one written out in units: the definition, as text."""
    firsts = [sum(units[:stage]) for stage in range(len(units))]
    found: list[str] = []
    for word in words.split():
        stage, number = word[1:].split(".")
        own = [firsts[int(stage)] + unit for unit in range(units[int(stage)])]
        ordered = own if word[0] in "FU" else own[::-1]
        found += [f"{word[0]}{each}.{number}" for each in ordered]
    return " ".join(found)


@st.composite
def schedules(draw):
    """Return a schedule of any builder, or a random one."""
    stages, micro_batches = draw(sizes)
    builder = draw(st.sampled_from([*SCHEDULES, None]))
    if builder is not None:
        return builder(stages, micro_batches)
    chance = random.Random(draw(st.integers(0, 999)))
    return random_schedule(chance, stages, micro_batches, min(2, stages), fixed=True, backward=True)


@given(schedules(), counts)
def test_orders_are_those_of_the_definition(schedule: Schedule, units: list[int]) -> None:
    units = units[: schedule.num_stages]
    found = refine(schedule, units)
    assert list(found.orders.words()) == [expanded(w, units) for w in schedule.orders.words()]
    assert found.num_stages == sum(units)
    kept = "num_micro_batches", "num_steps", "num_ranks", "has_updates", "is_in_order"
    assert all(getattr(found, name) == getattr(schedule, name) for name in kept)


@given(schedules(), counts)
def test_unit_reads_the_versions_of_its_stage(schedule: Schedule, units: list[int]) -> None:
    units = units[: schedule.num_stages]
    own, table = versions(schedule), versions(refine(schedule, units))
    owner = [stage for stage, count in enumerate(units) for _ in range(count)]
    for name in ("forward", "backward", "forward_ahead", "backward_ahead", "step"):
        shape = schedule.ranks.shape
        expected = np.broadcast_to(getattr(own, name), shape)[owner]
        assert (np.broadcast_to(getattr(table, name), expected.shape) == expected).all()
    assert table.alive == tuple(own.alive[stage] for stage in owner)


@given(schedules(), st.integers(1, 4))
def test_messages_stay_and_activations_are_counted_in_units(schedule: Schedule, count: int) -> None:
    found = refine(schedule, (count,) * schedule.num_stages)
    assert num_messages(found) == num_messages(schedule)
    assert peak_activations(found) == tuple(count * held for held in peak_activations(schedule))
    assert set(weight_copies(found)) == set(weight_copies(schedule))


@given(schedules(), counts)
def test_schedule_and_its_program_are_read_back(schedule: Schedule, units: list[int]) -> None:
    found = refine(schedule, units[: schedule.num_stages])
    assert Schedule.parse(str(found)) == found == Schedule.from_json(found.to_json())


@pytest.mark.parametrize("builder", ASYNCHRONOUS)
def test_rule_of_units_is_that_of_the_stages(builder, tmp_path) -> None:
    schedule = builder(3, 2)
    rule, found = schedule.weight_rule, refine(schedule, (2, 1, 3)).weight_rule
    assert found.name == f"{rule.name}/2,1,3"
    for unit, stage in enumerate((0, 0, 1, 2, 2, 2)):
        assert found.staleness(unit, 6, 2) == rule.staleness(stage, 3, 2)
        assert found.law(unit, 5, 6, 2) == rule.law(stage, 5, 3, 2)
    kept = "predictor", "decay", "rescale_steps", "warm_up_steps", "compensate"
    assert all(getattr(found, name) == getattr(rule, name) for name in kept)
    program = lower(refine(schedule, (2, 1, 3)))
    program.save(tmp_path / "program.json")
    assert Program.load(tmp_path / "program.json") == program


def test_refining_twice_is_refining_once() -> None:
    for builder in (one_f_one_b, *ASYNCHRONOUS):
        schedule = builder(2, 2)
        twice, once = refine(refine(schedule, (2, 1)), (1, 3, 2)), refine(schedule, (4, 2))
        assert twice.orders == once.orders
        assert (versions(twice).forward == versions(once).forward).all()
        assert Schedule.parse(str(twice)) == twice
        assert refine(schedule, (1, 1)) is schedule


def test_synchronous_rule_is_that_of_units_too() -> None:
    assert refine(one_f_one_b(2, 2), (2, 3)).weight_rule is SYNCHRONOUS
    assert refine(one_f_one_b(2, 2), (2, 3)).name == "one_f_one_b / units 2 3"


def test_orders_in_the_docstring_are_those_of_a_schedule() -> None:
    plain, cut = one_f_one_b(2, 1), refine(one_f_one_b(2, 1), (2, 3))
    pairs = zip(str(plain.orders).splitlines(), str(cut.orders).splitlines(), strict=True)
    text = "".join(f"    {left}       {right}\n" for left, right in pairs)
    assert text in inspect.getmodule(refine).__doc__


@pytest.mark.parametrize("units", [(2,), (2, 2, 2), (2, 0), (), (-1, 3)])
def test_wrong_units_are_refused(units) -> None:
    with pytest.raises(ScheduleError, match="units are"):
        refine(one_f_one_b(2, 2), units)


def test_rule_is_of_so_many_units_and_no_more() -> None:
    schedule = refine(ASYNCHRONOUS[0](2, 2), (2, 3))
    text = str(schedule).replace("stashing/2,3", "stashing/2,2")
    with pytest.raises(ScheduleError, match="stashing is in 4 units, not in 5"):
        Schedule.parse(text)
    for name in ("stashing/", "stashing/2,0", "none/2", "stashing/2;3"):
        assert rule_named(name, WEIGHT_RULES) is None
