"""Join: a newcomer becomes a rank between two steps, and the run is still the plain loop."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.errors import RunError
from penstock.members.calling import Caller
from penstock.members.launch_members import Lived, Scribe, Start, join, taken_in
from penstock.members.launch_members import newcomer as newcomer_at
from penstock.members.member import Outside, RunMember
from penstock.members.mesh import Mesh, listening
from penstock.members.words import View, Where
from tests.members import runs
from tests.members.test_every_kill import some
from tests.members.test_kills import check


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


def called(start: Start, where: Mapping[int, Where], number: int) -> Caller:
    """Return a newcomer with a number that is given."""
    caller = newcomer_at(next(iter(where.values())), start.token, start.pilots().graph)
    caller.mesh.own = number
    return caller


def newcomer(
    start: Start,
    where: Mapping[int, Where],
    token: bytes,
    graph: str = "",
    caller: Caller | None = None,
    limit_s: float = 300.0,
) -> int:
    pilot, made = start.pilots(), start.generations
    assert made is not None
    if caller is None:
        caller = newcomer_at(next(iter(where.values())), token, graph or pilot.graph)
    own = start._replace(join=made.join, pilots=lambda: pilot)
    scribe = Scribe(lambda step: None, lambda results: None)
    join(caller, tuple(where.values()), own, scribe, lambda words: None, limit_s)
    return caller.mesh.done


@pytest.mark.parametrize(
    ("token", "graph", "says", "limit_s"),
    [(b"other", "", "no rank", 0.5), (b"token", "other", "traced other", 300.0)],
)
def test_who_does_not_belong_to_the_run_is_told_so(
    token: bytes, graph: str, says: str, limit_s: float, tmp_path: Path
) -> None:
    """Who has another token is told nothing, and asks for as long as it may."""
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1)}
    problems: list[RunError] = []
    over = threading.Event()

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        with pytest.raises(RunError) as problem:
            newcomer(start, where[0], token, graph, limit_s=limit_s)
        problems.append(problem.value)
        over.set()

    told = runs.run(ways, plans, 2, tmp_path, runs.patient(2, lambda _: over.is_set()), joins=joins)
    check(told, "gpt", killed=0)
    assert says in problems[0].message


def test_who_waits_to_be_taken_in_leaves_when_it_has_to(tmp_path: Path) -> None:
    """The run has no plan for one more."""
    ways = runs.ways_of("gpt", "adamw", 2)
    plans = {2: runs.plan_for(ways, 2, 1)}
    lived: list[Lived] = []
    said: list[str] = []
    has_asked, has_left = threading.Event(), threading.Event()

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        own = start._replace(notice=has_asked.is_set)
        caller = newcomer_at(next(iter(where[0].values())), start.token, start.pilots().graph)
        scribe = Scribe(lambda step: None, lambda results: None)
        lived.append(join(caller, tuple(where[0].values()), own, scribe, said.append, 3600.0))
        has_left.set()

    def asked(member: RunMember) -> bool:
        if member.mesh.asks:
            has_asked.set()
        return has_left.is_set()

    told = runs.run(ways, plans, 2, tmp_path, runs.patient(2, asked), joins=joins)
    check(told, "gpt", killed=0)
    assert lived == [(False, 0)]
    assert said == ["this process has to go, and the run had not taken it in"]


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


def patient_at(**generations: int) -> runs.Kill:
    """Let members wait before a step (s1=2: step 1) for a generation, or for who makes it begin."""

    @contextmanager
    def killed(number: int, member: RunMember) -> Iterator[None]:
        def is_there(generation: int) -> bool:
            view = member.last_view
            return view.generation + bool(member._newcomers(view)) >= generation

        def waits(now: int) -> None:
            assert member.mesh.wait(lambda: is_there(generations.get(f"s{now}", 0)), 300.0)

        runs._doom.at, runs._doom.points, runs._doom.waits = None, None, waits
        yield

    return killed


@pytest.mark.parametrize("numbers", [(10, 20), (20, 10)])
def test_one_that_comes_after_another_reaches_it_whatever_their_numbers(
    numbers: tuple[int, int], tmp_path: Path
) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {count: runs.plan_for(ways, 1, count) for count in (1, 2, 3)}
    came: list[int] = []

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        one, other = (called(start, where[0], number) for number in numbers)

        def lives(caller: Caller) -> None:
            came.append(newcomer(start, where[0], start.token, caller=caller))

        threads = [threading.Thread(target=lives, args=(caller,)) for caller in (one, other)]
        threads[0].start()
        assert one.mesh.wait(lambda: one.mesh.view is not None, 300.0)
        threads[1].start()
        for thread in threads:
            thread.join()

    told = runs.run(ways, plans, 1, tmp_path, patient_at(s1=2, s3=3), joins=joins)
    check(told, "gpt", killed=0)
    assert came == [runs.STEPS] * 2
    assert [len(event.view.members) for event in told.events] == [1, 2, 3]


def test_a_newcomer_that_dies_as_it_is_taken_in_stops_nobody(tmp_path: Path) -> None:
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {count: runs.plan_for(ways, 1, count) for count in (1, 2, 3)}

    def joins(start: Start, where: list[Mapping[int, Where]]) -> None:
        while not where:
            time.sleep(0.01)
        caller = called(start, where[0], 10)
        caller.mesh.start()
        assert 10 in taken_in(caller, tuple(where[0].values()), 300.0).members
        caller.mesh.drop()

    told = runs.run(ways, plans, 2, tmp_path, patient_at(s2=2), joins=joins)
    check(told, "gpt", killed=0)
    assert [event.view.members for event in told.events][-1] == (0, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", ["replicas", "pipeline"])
def test_a_rank_dies_while_a_newcomer_is_taken_in(shape: str, tmp_path: Path) -> None:
    """At each point between two generations; who has come goes on with the one that is left."""
    ways = runs.ways_of("gpt", "adamw", 3)
    plans = {
        n: runs.plan_for(ways, *((1, n) if shape == "replicas" else (n, 1))) for n in (1, 2, 3)
    }
    for points in some(60, 1):
        came: list[int] = []

        def joins(start: Start, where: list[Mapping[int, Where]], came: list[int] = came) -> None:
            while not where:
                time.sleep(0.01)
            came.append(newcomer(start, where[0], start.token))

        wait, dies = patient_at(s2=2), runs.doomed_between((-1, 0, 0), 1, points)

        @contextmanager
        def both(
            number: int, member: RunMember, wait: runs.Kill = wait, dies: runs.Kill = dies
        ) -> Iterator[None]:
            with wait(number, member), dies(number, member):
                yield

        told = runs.run(ways, plans, 2, tmp_path / f"{points}", both, joins=joins)
        died = sum(isinstance(end.problem, runs.Killed) for end in told.ended.values())
        check(told, "gpt", killed=died)
        assert came == [runs.STEPS]


def _nothing(*about: object) -> None:
    """Let it pass."""


@pytest.mark.parametrize(
    ("view", "what"),
    [
        (View(1, 0, "", (7, 9)), "begins"),
        (View(4, 30, "", (7, 9), before=(9,)), "joined"),
        (View(4, 30, "", (7, 9), before=(8, 9), gone={8: "died"}), "lost"),
        (View(4, 30, "", (7, 9), before=(7, 8, 9), gone={8: "left"}), "left"),
        (View(4, 30, "", (7, 9), before=(7, 9)), "moved"),
    ],
)
def test_what_has_happened_is_told_by_a_newcomer_too(view: View, what: str) -> None:
    """Numbers of newcomers are by chance, so one of them may be the first that tells."""
    mesh = Mesh(7, listening(), b"token")
    mesh.start()
    member = RunMember(mesh, None, Outside(_nothing, _nothing))  # type: ignore
    assert member._event(view, 0).what == what
    mesh.close()
