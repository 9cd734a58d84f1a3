"""Saving: checkpoints of an elastic run are written beside its steps, whole whoever dies when."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.checkpoints import beside, checkpoint, folders, saver
from penstock.checkpoints.saver import Saver, State
from penstock.members.launch_members import Scribe, Start, run_members
from penstock.members.member import RunMember
from penstock.members.vote import Vote
from penstock.members.words import View
from penstock.program.reductions import Commit
from penstock.runtime.calls import StepResult
from penstock.training.begin import Begin
from penstock.training.elastic_run import ElasticRun, RunPilot, text_of
from tests.members import runs
from tests.members.test_kills import case_of, check
from tests.members.test_processes import Signals, events_in
from tests.parity.models import plain_loop

WRITER = "tests.members.prompt_writer"
EVERY = 3  # of five steps: one is due on the way
_own = threading.local()  # the number of the member that is this thread


@pytest.fixture(autouse=True)
def _prompt_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_WRITER", WRITER)


def numbered(number: int, member: RunMember) -> contextlib.AbstractContextManager[None]:
    """Kill nobody by the call of a step; note who is who."""
    _own.number = number
    return contextlib.nullcontext()


def until(is_so: Callable[[], object]) -> None:
    for _ in range(30_000):
        if is_so():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never is")


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def writers_in(folder: Path) -> list[int]:
    """Return the processes that write into the checkpoints of a run."""
    found, place = [], str(folder / "checkpoints")
    for own in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if WRITER.encode() in (own / "cmdline").read_bytes():
                files = [os.readlink(file) for file in (own / "fd").iterdir()]
                found += [int(own.name)] if place in files else []
    return found


def test_they_are_to_the_byte_those_that_are_written_at_once(tmp_path, monkeypatch):
    _, count, ways, plans = case_of("divided")
    aside = runs.run(ways, plans, count, tmp_path / "aside", every=2)
    monkeypatch.setattr(saver, "free_bytes", lambda: 0)
    at_once = runs.run(ways, plans, count, tmp_path / "at once", every=2)
    blocked = [
        [len(each.saves.blocked_s) for end in told.ended.values() for each in end.results or ()]
        for told in (aside, at_once)
    ]
    assert {*blocked[0]} == {2}
    assert {*blocked[1]} == {0}
    for name in ("step-000004", "step-000005"):
        ours, theirs = (tmp_path / way / "checkpoints" / name for way in ("aside", "at once"))
        files = sorted(path.name for path in theirs.iterdir())
        assert len(files) == 1 + count
        for file in files:
            assert (ours / file).read_bytes() == (theirs / file).read_bytes(), (name, file)
    assert left_in(tmp_path / "aside") == ["step-000004", "step-000005"]


@pytest.mark.parametrize("who", [0, 3])
@pytest.mark.sampled(2)
def test_one_that_all_have_ordered_is_completed_though_a_rank_dies(who, tmp_path, monkeypatch):
    model, count, ways, plans = case_of("divided")
    save, enter, seen = Saver.save, Saver.enter, list[checkpoint.Checkpoint]()
    all_ordered = threading.Barrier(count, timeout=300.0)

    def saves(own: Saver, step: int, state: State | None, *, waits: bool) -> None:
        save(own, step, state, waits=waits)
        if step == EVERY and not waits:
            all_ordered.wait()
            if _own.number == who:
                raise runs.Killed

    def enters(own: Saver, *about, **named) -> None:
        enter(own, *about, **named)
        if about[2] == 2:
            folder = folders.folder_of(own.checkpoints, EVERY)
            until((folder / "state.json").exists)
            seen.append(checkpoint.load(folder))
            until(lambda: not own.is_writing())
            assert not own.has_lapsed

    monkeypatch.setattr(Saver, "save", saves)
    monkeypatch.setattr(Saver, "enter", enters)
    told = runs.run(ways, plans, count, tmp_path, numbered, every=EVERY)
    check(told, model)
    expected = plain_loop(runs.job_of(model), EVERY, runs.MICRO_BATCHES).weights
    assert len(seen) == count - 1
    for kept in seen:
        for key, value in expected.items():
            torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)
    assert left_in(tmp_path) == ["step-000003", "step-000005"]
    until(lambda: not writers_in(tmp_path))


def without(who: int, count: int) -> Callable[..., None]:
    """Return what orders checkpoints; a member dies before it does, when all others will."""
    save, all_come = Saver.save, threading.Barrier(count, timeout=300.0)

    def saves(own: Saver, step: int, state: State | None, *, waits: bool) -> None:
        if step == EVERY:
            all_come.wait()
            if _own.number == who:
                raise runs.Killed
        save(own, step, state, waits=waits)

    return saves


@pytest.mark.parametrize(("name", "who"), [("grid", 1), ("divided", 0), ("divided", 2)])
@pytest.mark.sampled(2)
def test_one_that_a_rank_has_not_ordered_is_dropped_and_made_up_for(
    name, who, tmp_path, monkeypatch
):
    model, count, ways, plans = case_of(name)
    wants = RunMember._wants_checkpoint

    def wanted(member: RunMember, task) -> bool:
        if member.last_view.generation == 2 and member._saver is not None:
            until(lambda: not member._saver.is_writing())
        return wants(member, task)

    monkeypatch.setattr(Saver, "save", without(who, count))
    monkeypatch.setattr(RunMember, "_wants_checkpoint", wanted)
    told = runs.run(ways, plans, count, tmp_path, numbered, every=EVERY)
    check(told, model)
    assert left_in(tmp_path) == ["step-000004", "step-000005"]
    until(lambda: not writers_in(tmp_path))


def test_one_that_is_due_next_takes_the_place_of_one_that_lacks_a_part(tmp_path, monkeypatch):
    """Nobody waits until it is certain that the part does not come."""
    model, count, ways, plans = case_of("divided")
    words, say = list[bytes](), saver.Beside.say

    def says(own: saver.Beside, word: bytes) -> None:
        words.append(word)
        if word == saver.DROP:  # without what came before it
            say(own, word)

    monkeypatch.setattr(Saver, "save", without(1, count))
    monkeypatch.setattr(saver.Beside, "say", says)
    told = runs.run(ways, plans, count, tmp_path, numbered, every=EVERY)
    check(told, model)
    assert words.count(saver.LOST) == count - 1
    assert saver.DROP in words
    assert left_in(tmp_path) == ["step-000005"]


def test_a_writer_that_is_killed_costs_its_checkpoint_alone(tmp_path, monkeypatch):
    model, count, ways, plans = case_of("divided")
    save = Saver.save

    def saves(own: Saver, step: int, state: State | None, *, waits: bool) -> None:
        is_struck = step == EVERY and _own.number == 1
        if is_struck:
            own._writer._poll.poll(300_000)  # it has made room
            os.kill(own._writer.process.pid, signal.SIGSTOP)
        save(own, step, state, waits=waits)
        if is_struck:
            os.kill(own._writer.process.pid, signal.SIGKILL)
        if step == EVERY:
            until(lambda: not own.is_writing())
            assert own.has_lapsed

    monkeypatch.setattr(Saver, "save", saves)
    told = runs.run(ways, plans, count, tmp_path, numbered, every=EVERY)
    check(told, model, killed=0)
    assert left_in(tmp_path) == ["step-000004", "step-000005"]
    assert len(told.events) == 1, "nobody is lost"


def test_writers_that_are_killed_again_and_again_end_the_run(tmp_path, monkeypatch):
    _, count, ways, plans = case_of("divided")
    save = Saver.save

    def saves(own: Saver, step: int, state: State | None, *, waits: bool) -> None:
        save(own, step, state, waits=waits)
        if _own.number == 1 and own._is_ours:
            os.kill(own._writer.process.pid, signal.SIGKILL)
        until(lambda: not own.is_writing())

    monkeypatch.setattr(Saver, "save", saves)
    monkeypatch.setattr(Saver, "_done", _undone)
    told = runs.run(ways, plans, count, tmp_path, numbered, every=1)
    problems = [str(end.problem) for end in told.ended.values()]
    assert all("was killed by signal 9" in words for words in problems), problems


_done = Saver._done


def _undone(own: Saver, answer) -> None:
    """Take any answer for that of a checkpoint that was dropped, as if the kill came first."""
    _done(own, answer and saver.Reply(answer.step, 0.0, follows=True))


# -- processes -------------------------------------------------------------------------------------


def _kill(pid: int, how: int) -> None:
    if how < 0:
        os.killpg(pid, signal.SIGKILL)  # the rank, and the process that writes for it
    else:
        os.kill(pid, how)


class Strikes(Signals):
    """Strikes members while steps are told; SIGKILL below 0: what writes for it dies too."""

    def __init__(self, strikes: dict[int, list[tuple[int, int]]], struck: Path) -> None:
        super().__init__({})
        self.strikes, self.struck = strikes, struck

    def __call__(self, step: StepResult) -> None:
        super().__call__(step)
        for how, member in self.strikes.pop(step.step, []):
            _kill(self.pids[member], how)
        if not self.strikes:
            self.struck.touch()


@pytest.fixture
def struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let no member be through with step 3 before the file is there: the strikes come in time."""
    place, vote = tmp_path / "struck", Vote.__call__

    def waiting(own: Vote, commit: Commit) -> None:
        if own.rank.progress.first_step + commit.step == 3:
            until(place.exists)
        vote(own, commit)

    monkeypatch.setattr(Vote, "__call__", waiting)
    return place


def run_of(folder: Path, strikes: Signals, plans: dict[int, runs.Plan], every: int) -> None:
    """Run three processes, with a checkpoint after every so many steps; it is whole at the end."""
    ways = runs.ways_of("gpt", "adamw", 3)
    task = partial(runs.task_of, folder=folder, every=every)
    run = ElasticRun(ways, task, plans, Begin(), runs.STEPS, folder)
    start = Start(View(1, 0, text_of(plans[3]), (0, 1, 2)), b"token", lambda: RunPilot(run))
    assert run_members(start, strikes, Scribe(lambda step: None, lambda results: None))
    folders.wait_for_writers(folder / "checkpoints")
    until(lambda: not writers_in(folder))
    assert [name for name in left_in(folder) if name.startswith(".")] == []
    found = checkpoint.newest_whole(folder / "checkpoints")
    assert found is not None
    assert found[1] == runs.STEPS
    kept = checkpoint.load(found[0]).tensors
    expected = plain_loop(runs.job_of("gpt"), runs.STEPS, runs.MICRO_BATCHES).weights
    for key, value in expected.items():
        torch.testing.assert_close(kept[key], value, rtol=1e-9, atol=1e-9)


def plans() -> dict[int, runs.Plan]:
    ways, shapes = runs.ways_of("gpt", "adamw", 3), {3: (3, 1), 2: (1, 2), 1: (1, 1)}
    return {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}


@pytest.mark.parametrize("how", [signal.SIGKILL, -signal.SIGKILL, signal.SIGTERM])
@pytest.mark.sampled(2)
def test_processes_leave_whole_checkpoints_and_no_writer(how, struck, tmp_path):
    strikes = Strikes({1: [(how, 1)]}, struck)
    run_of(tmp_path, strikes, plans(), 1)
    assert [step.step for step in strikes.steps] == list(range(runs.STEPS))


@pytest.mark.parametrize(("leave", "is_guarded"), [([1], False), ([1, 2], True)])
def test_who_leaves_with_what_nobody_else_has_leaves_it_in_a_checkpoint(
    leave, is_guarded, struck, tmp_path
):
    made = plans()
    if not is_guarded:
        made[3] = made[3].changed(guard=None)
    strikes = Strikes({1: [(signal.SIGTERM, who) for who in leave]}, struck)
    run_of(tmp_path, strikes, made, 0)  # none is due
    assert [step.step for step in strikes.steps] == list(range(runs.STEPS))
    events = events_in(tmp_path)
    assert {*events[1]["gone"].values()} == {"notice"}
    steps = [(event["step"], event["back_to"]) for event in events[1:] if event["back_to"]]
    assert all(Path(place).name == f"step-{step:06d}" for step, place in steps)
    assert is_guarded or len(steps) == 1
