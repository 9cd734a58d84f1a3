"""Ends: of a run that has ended, or is asked to end, no rank goes on."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.members.calling import ask_to_stop
from penstock.members.launch_members import Start
from penstock.members.member import GivenUpError, Outside, OverError, RunMember
from penstock.members.words import View, Where
from penstock.training.at_work import ENDED
from tests.members import runs
from tests.members.test_mesh import meshes


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def test_who_is_left_does_not_go_on_with_a_run_that_has_ended_meanwhile(tmp_path: Path) -> None:
    """As where a line was cut, and the run was ended on its other side."""
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1), 1: runs.plan_for(ways, 1, 1)}
    (tmp_path / ENDED).write_text("{}")
    told = runs.run(ways, plans, 2, tmp_path, runs.doomed(0, 2, 5))
    assert isinstance(told.ended[1].problem, OverError)
    assert max(step.step for step in told.steps) < runs.STEPS - 1
    assert [event.view.generation for event in told.events] == [1]


def test_who_knows_the_token_can_end_a_run_from_anywhere(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1)}
    has_asked = threading.Event()

    def asks(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        ask_to_stop(where[0][1], start.token)
        has_asked.set()

    def heard(member: RunMember) -> bool:
        return has_asked.is_set() and (member.mesh.own != 1 or member.mesh.is_asked_to_stop)

    told = runs.run(ways, plans, 2, tmp_path, runs.patient(2, heard), joins=asks)
    assert [end.problem for end in told.ended.values()] == [None, None]
    assert max(step.step for step in told.steps) <= 2


def test_who_has_made_a_step_that_the_others_do_again_joins_them_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It had heard that it counts from one whom the others could not reach."""
    monkeypatch.setattr(RunMember, "_generation", lambda self, view, before: None)
    later = View(2, 2, "", (0, 1), resume="")
    monkeypatch.setattr(RunMember, "_agreed", lambda self, view: later)
    with meshes(1) as ([own], _):
        member = RunMember(own, None, Outside(None, None))  # type: ignore[arg-type]
        member._state.done = 3
        with pytest.raises(GivenUpError, match="step 3 has counted"):
            member.live(View(1, 0, "", (0, 1)))
