"""Join: a newcomer becomes a rank between two steps, and the run is still the plain loop."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.elastic.launch import Scribe, Start, join
from penstock.elastic.launch import newcomer as newcomer_at
from penstock.elastic.member import RunMember
from penstock.elastic.words import Where
from penstock.errors import RunError
from tests.elastic import runs
from tests.elastic.test_kills import check


@pytest.fixture(autouse=True)
def mortal(monkeypatch: pytest.MonkeyPatch) -> None:
    runs.mortal(monkeypatch)


def test_a_newcomer_is_taken_in_between_two_steps(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    shapes = {3: (3, 1), 2: (2, 1), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}
    came: list[int] = []

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        came.append(newcomer(start, where[0], start.token))

    told = runs.run(ways, plans, 2, tmp_path, runs.patient(2), joins=joins)
    check(told, "gpt", killed=0)
    assert came == [runs.STEPS]
    assert [len(event.view.members) for event in told.events] == [2, 3]
    assert told.events[1].what == "joined"
    assert told.events[1].moved_bytes > 0


def newcomer(start: Start, where: Mapping[int, Where], token: bytes, graph: str = "") -> int:
    pilot, made = start.pilots(), start.generations
    assert made is not None
    caller = newcomer_at(next(iter(where.values())), token, graph or pilot.graph)
    own = start._replace(join=made.join, pilots=lambda: pilot)
    scribe = Scribe(lambda step: None, lambda results: None)
    join(caller, tuple(where.values()), own, scribe, lambda words: None, 60.0)
    return caller.mesh.done


@pytest.mark.parametrize(
    ("token", "graph", "says"), [(b"other", "", "no rank"), (b"token", "other", "traced other")]
)
def test_who_does_not_belong_to_the_run_is_told_so(
    token: bytes, graph: str, says: str, tmp_path: Path
) -> None:
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1)}
    problems: list[RunError] = []
    over = threading.Event()

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        with pytest.raises(RunError) as problem:
            newcomer(start, where[0], token, graph)
        problems.append(problem.value)
        over.set()

    told = runs.run(ways, plans, 2, tmp_path, runs.patient(2, lambda _: over.is_set()), joins=joins)
    check(told, "gpt", killed=0)
    assert says in problems[0].message


def test_two_that_come_together_are_taken_in_together(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {3: runs.plan_for(ways, 3, 1), 1: runs.plan_for(ways, 1, 1)}
    came: list[int] = []

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        newcomers = [
            threading.Thread(target=lambda: came.append(newcomer(start, where[0], start.token)))
            for _ in range(2)
        ]
        for each in newcomers:
            each.start()
        for each in newcomers:
            each.join()

    def both(member: RunMember) -> bool:
        view = member.last_view
        return len(view.members) == 3 or len(member._newcomers(view)) == 2

    told = runs.run(ways, plans, 1, tmp_path, runs.patient(2, both), joins=joins)
    check(told, "gpt", killed=0)
    assert came == [runs.STEPS] * 2
    assert [len(event.view.members) for event in told.events] == [1, 3]
