"""Standing: a rank whose own step stands says so, and leaves; one that waits does not."""

import sys
import threading
from types import FrameType

import pytest

from penstock.members import standing
from penstock.members.mesh import Mesh
from penstock.members.standing import (
    LEAVES_S,
    TIMES_LEAVES,
    TOLD_S,
    VALIDATES_S,
    Spot,
    Stands,
    StepWatch,
    spot_of,
)
from tests.members.test_mesh import LIMIT_S, meshes


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def watch(monkeypatch: pytest.MonkeyPatch, spot: Spot | None) -> tuple[StepWatch, Clock, list[str]]:
    """Return a watch over a rank that is at a spot, its clock, and what it says."""
    clock, said = Clock(), list[str]()
    monkeypatch.setattr(standing, "spot_of", lambda frame: spot)
    own = StepWatch(threading.get_ident(), said.append, clock)
    own.begins()
    return own, clock, said


DATA = Spot("w.py:3 in data", waits=False)


def test_a_step_that_stands_is_told_once_and_then_left(monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock, said = watch(monkeypatch, DATA)
    clock.now_s = 0.5
    own.counts()
    looks = dict[float, Stands]()
    for after_s in (0.1, TOLD_S - 0.1, TOLD_S + 0.1, LEAVES_S - 0.1, LEAVES_S + 0.1):
        clock.now_s = 0.5 + after_s
        looks[after_s] = own.look()
    assert [*looks.values()] == ["goes", "goes", "stands", "stands", "leaves"]
    assert len(said) == 1
    assert "w.py:3 in data" in said[0]
    own.counts()
    assert own.look() == "goes"


def test_a_long_step_is_measured_by_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock, _ = watch(monkeypatch, DATA)
    clock.now_s = 10.0
    own.counts()
    clock.now_s += 45.0
    assert own.look() == "goes"
    clock.now_s += 10.0
    assert own.look() == "stands"
    clock.now_s = 10.0 + TIMES_LEAVES * 10.0 + 1.0
    assert own.look() == "leaves"


@pytest.mark.parametrize("spot", [None, Spot("", waits=True)])
def test_who_waits_or_is_in_no_step_does_not_stand(
    spot: Spot | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, clock, said = watch(monkeypatch, spot)
    own.counts()
    clock.now_s = 10 * LEAVES_S
    assert (own.look(), said) == ("goes", [])


def test_before_the_first_step_of_a_generation_none_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    own, clock, said = watch(monkeypatch, DATA)
    own.counts()
    own.begins()
    clock.now_s = 10 * LEAVES_S
    assert (own.look(), said) == ("goes", [])


def test_what_is_done_between_two_steps_is_no_part_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A validation of a minute: the rank that reads first thing afterwards does not stand."""
    own, clock, said = watch(monkeypatch, DATA)
    own.counts()
    clock.now_s = 3 * LEAVES_S
    own.goes_on()
    clock.now_s += 0.1
    assert (own.look(), said) == ("goes", [])
    own.counts()
    clock.now_s += TOLD_S + 0.5
    assert own.look() == "stands"  # by what its steps have taken, not by what came between


def test_a_long_validation_is_told_once_and_nobody_leaves_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, clock, said = watch(monkeypatch, Spot("w.py:9 in held_out", waits=False, validates=True))
    own.counts()
    for after_s in (VALIDATES_S - 1.0, VALIDATES_S + 1.0, 10 * VALIDATES_S):
        clock.now_s = after_s
        assert own.look() == "goes"
    assert len(said) == 1
    assert "w.py:9 in held_out" in said[0]


STEPS = f"{standing._ROOT}/members/steps.py"


def in_files(*files: tuple[str, str]) -> FrameType:
    """Return a frame whose callers are functions of these files, the outermost first."""
    call = sys._getframe
    for file, name in reversed(files):
        space: dict = {"call": call}
        exec(compile(f"def {name}():\n    return call()", file, "exec"), space)
        call = space[name]
    return call()


def test_where_a_rank_is_is_told_by_its_own_code() -> None:
    reader = f"{standing._ROOT}/runtime/reader.py", "read"
    found = spot_of(in_files((STEPS, "_step"), reader, ("/there/w.py", "data")))
    assert found == Spot("/there/w.py:2 in data", waits=False)
    sums = f"{standing._ROOT}/transport/threads.py", "all_reduce"
    assert spot_of(in_files((STEPS, "_step"), sums)) == Spot("in a step", waits=True)
    assert spot_of(in_files((STEPS, "_save"), reader)) is None
    validates = f"{standing._ROOT}/runtime/validate.py", "validated"
    found = spot_of(in_files((STEPS, "_save"), validates, ("/there/w.py", "held_out")))
    assert found == Spot("/there/w.py:2 in held_out", waits=False, validates=True)
    assert spot_of(None) is None


def leaves(own: Mesh) -> None:
    own.looks = lambda: "leaves"


def test_one_that_stands_leaves_for_certain_and_learns_of_it() -> None:
    with meshes(0, 1) as ((first, other), where):
        for each in (first, other):
            each.where |= where
        other.connect(where)
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        leaves(other)
        assert first.wait(lambda: 1 in first.lost, LIMIT_S)
        assert first.lost == {1: "left"}
        assert other.wait(lambda: other.given_up, LIMIT_S)


def test_where_all_stand_none_leaves() -> None:
    with meshes(0, 1) as ((first, other), where):
        for each in (first, other):
            each.where |= where
        other.connect(where)
        assert first.wait(lambda: 1 in first.members, LIMIT_S)
        first.looks = other.looks = lambda: "stands"
        assert first.wait(lambda: first._standing == {1}, LIMIT_S)
        assert other.wait(lambda: other._standing == {0}, LIMIT_S)
        leaves(first)
        leaves(other)
        assert not first.wait(lambda: first.given_up or other.given_up, 0.6)
