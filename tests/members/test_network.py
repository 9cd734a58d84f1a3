"""Network: members of two hosts with a real line between them, which is cut, or whose end dies."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import pytest
import torch

from bench.network import can_throttle
from penstock.checkpoints import checkpoint
from penstock.members import launch_members, member
from penstock.members.launch_members import Scribe
from penstock.members.member import RunMember
from penstock.members.mesh import SILENT_S, Mesh
from penstock.members.words import Told
from penstock.runtime.calls import StepResult
from penstock.runtime.rank import Rank
from penstock.training.at_work import ENDED
from tests.members import runs
from tests.members.network import LIMIT_S, Cable, Host, cable, kill, members_of, start_host, until
from tests.members.test_processes import events_in, start_of
from tests.parity.models import plain_loop

CAN, WHY = can_throttle()
pytestmark = pytest.mark.skipif(not CAN, reason=WHY)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[RunMember], bool]]:
    """Let the first member wait, after some steps, until something is so."""
    waits: dict[int, Callable[[RunMember], bool]] = {}
    counts = RunMember.counts

    def patient(member: RunMember, told: Told, rank: Rank) -> None:
        counts(member, told, rank)
        if member.is_first and told.step in waits:
            assert member.mesh.wait(lambda: waits[told.step](member), LIMIT_S)

    monkeypatch.setattr(RunMember, "counts", patient)
    return waits


def steps_in(folder: Path) -> list[int]:
    path = folder / "steps"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def run(
    folder: Path,
    happens: Callable[[Cable, list[Host]], None],
    stages: int = 1,
    line_of: Callable[[], AbstractContextManager[Cable]] = cable,
    *,
    writes_end: bool = False,
) -> list[str]:
    """Run two members on each of two hosts; after the second step something happens.

    writes_end:  whether the end is written down where both see it.
    """
    ways = runs.ways_of("gpt", "adamw", 4)
    shapes = {4: (stages, 4 // stages), 3: (1, 3), 2: (stages, 2 // stages), 1: (1, 1)}
    plans = {count: runs.plan_for(ways, *shape) for count, shape in shapes.items()}

    def report(step: StepResult) -> None:
        with (folder / "steps").open("a") as file:
            file.write(f"{step.step} ")
        if step.step == 1:
            until((folder / "happened").exists)

    def finish(results: object) -> None:
        if writes_end:
            (folder / ENDED).write_text("{}")

    start, scribe = start_of(ways, plans, folder), Scribe(report, finish)
    with line_of() as line:
        hosts = [
            start_host(place, members, start, folder, scribe)
            for place, members in zip(line.places, ((0, 1), (2, 3)), strict=True)
        ]
        try:
            until(lambda: steps_in(folder)[-1:] == [1])
            happens(line, hosts)
            (folder / "happened").touch()
            return [host.ended() for host in hosts]
        finally:
            line.mend()
            for host in hosts:
                kill(host)


def check(folder: Path) -> None:
    """Raise unless every step happened, and the weights are those of the plain loop."""
    assert sorted({*steps_in(folder)}) == list(range(runs.STEPS))
    newest = checkpoint.latest(folder / "checkpoints")
    assert newest is not None
    kept = checkpoint.load(newest)
    expected = plain_loop(runs.job_of("gpt"), runs.STEPS, runs.MICRO_BATCHES)
    for key, value in expected.weights.items():
        torch.testing.assert_close(kept.tensors[key], value, rtol=1e-9, atol=1e-9)


def gone(folder: Path) -> dict[str, str]:
    return {k: v for event in events_in(folder) for k, v in event["gone"].items()}


@pytest.mark.parametrize("lost", [0, 1], ids=["the first host", "the other host"])
@pytest.mark.sampled(2)
def test_a_host_that_dies_is_two_ranks_lost_at_once(lost: int, tmp_path: Path) -> None:
    ended = run(tmp_path, lambda line, hosts: kill(hosts[lost]), stages=2)
    assert ended[1 - lost] == "True"
    check(tmp_path)
    assert gone(tmp_path) == {str(2 * lost): "died", str(2 * lost + 1): "died"}


def test_a_rank_that_dies_is_lost_alone(tmp_path: Path) -> None:
    ended = run(tmp_path, lambda line, hosts: os.kill(members_of(hosts[1])[0], signal.SIGKILL))
    assert ended == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {"2": "died"}


def test_of_a_line_that_is_cut_one_side_goes_on_and_the_other_waits_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "QUORUM_S", 2.0)
    hosts: list[Host] = []

    def happens(line: Cable, them: list[Host]) -> None:
        hosts.extend(them)
        line.cut()

    ended = run(tmp_path, happens)
    check(tmp_path)
    assert gone(tmp_path) == {"2": "silent", "3": "silent"}
    assert ended[0] == "True"
    assert ended[1].startswith("too few ranks are left to go on without the others: 0 silent, 1 s")
    assert "ranks [0, 1] cannot be reached, and may go on" in hosts[1].said.read_text()


def test_when_the_line_is_mended_the_side_that_waited_joins_the_other_again(
    tmp_path: Path, waits: dict[int, Callable[[RunMember], bool]]
) -> None:
    waits[2] = lambda first: len(first.mesh.asks) == 2
    hosts: list[Host] = []

    def happens(line: Cable, them: list[Host]) -> None:
        hosts.extend(them)
        line.cut()
        (tmp_path / "happened").touch()
        until(lambda: steps_in(tmp_path)[-1] == 2)  # one side has gone on
        line.mend()

    ended = run(tmp_path, happens)
    assert ended == ["True", "True"], [host.said.read_text() for host in hosts]
    check(tmp_path)
    events = events_in(tmp_path)
    assert [event["what"] for event in events] == ["begins", "lost", "joined"]
    assert len(events[2]["members"]) == 4


@pytest.mark.long
def test_of_a_line_that_is_mended_to_ranks_that_did_not_run_only_one_side_has_gone_on(
    tmp_path: Path, waits: dict[int, Callable[[RunMember], bool]]
) -> None:
    """They have not noticed that the line was silent, and see it end: nobody is dead for that."""
    waits[2] = lambda first: len(first.mesh.asks) == 2

    def happens(line: Cable, them: list[Host]) -> None:
        line.cut()
        (tmp_path / "happened").touch()
        for rank in members_of(them[1]):
            os.kill(rank, signal.SIGSTOP)
        threading.Event().wait(3.0)  # less than after which one is silent, more than half of it
        for rank in members_of(them[1]):
            os.kill(rank, signal.SIGCONT)
        until(lambda: steps_in(tmp_path)[-1] == 2)
        line.mend()

    assert run(tmp_path, happens) == ["True", "True"]
    check(tmp_path)


def test_a_side_that_was_cut_off_ends_when_the_other_has_ended(tmp_path: Path) -> None:
    hosts: list[Host] = []

    def happens(line: Cable, them: list[Host]) -> None:
        hosts.extend(them)
        line.cut()
        (tmp_path / "happened").touch()
        until(lambda: not them[0].process.is_alive())  # it went on, to the end
        line.mend()

    assert run(tmp_path, happens, writes_end=True) == ["True", "True"]
    check(tmp_path)
    assert steps_in(tmp_path)[-3:] == [2, 3, 4]  # the other side has done none of them again
    assert f"the run has ended: {tmp_path / ENDED} is there" in hosts[1].said.read_text()


def paused(hosts: list[Host], which: int, is_over: Callable[[], object]) -> None:
    """Stop all ranks of a host until something has come back."""
    ranks = members_of(hosts[which])
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    is_over()
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)


def seconds(count: float) -> None:
    threading.Event().wait(count)


SHORT_S = 2.0


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a line be silent for longer than any test is kept from the processor."""
    assert SHORT_S < SILENT_S / 1.5
    monkeypatch.setattr(launch_members, "Mesh", partial(Mesh, silent_s=LIMIT_S))


def test_a_cut_of_two_seconds_is_nobodys_loss(tmp_path: Path, patient: None) -> None:
    def happens(line: Cable, hosts: list[Host]) -> None:
        line.cut()
        (tmp_path / "happened").touch()
        seconds(SHORT_S)
        line.mend()

    assert run(tmp_path, happens) == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {}


@pytest.mark.parametrize("which", [0, 1], ids=["the first host", "the other host"])
@pytest.mark.sampled(2)
def test_a_pause_of_a_second_is_nobodys_loss(which: int, tmp_path: Path, patient: None) -> None:
    ended = run(tmp_path, lambda line, hosts: paused(hosts, which, partial(seconds, SHORT_S / 2)))
    assert ended == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {}


def test_ranks_that_are_paused_until_the_others_have_gone_on_join_them_again(
    tmp_path: Path, waits: dict[int, Callable[[RunMember], bool]]
) -> None:
    waits[2] = lambda first: len(first.mesh.asks) == 2

    def happens(line: Cable, hosts: list[Host]) -> None:
        (tmp_path / "happened").touch()
        paused(hosts, 1, lambda: until(lambda: steps_in(tmp_path)[-1] == 2))

    assert run(tmp_path, happens) == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {"2": "silent", "3": "silent"}
    assert [event["what"] for event in events_in(tmp_path)] == ["begins", "lost", "joined"]


@pytest.mark.long
@pytest.mark.parametrize("pause", [20.0, 120.0])
@pytest.mark.parametrize("what", ["cut", "pause"])
def test_so_do_those_that_were_away_for_long(
    what: str, pause: float, tmp_path: Path, waits: dict[int, Callable[[RunMember], bool]]
) -> None:
    """A line that is cut for longer than a minute is none that anyone waits for."""
    waits[2] = lambda first: len(first.mesh.asks) == 2 or (what, pause) == ("cut", 120.0)

    def happens(line: Cable, hosts: list[Host]) -> None:
        (tmp_path / "happened").touch()
        if what == "pause":
            paused(hosts, 1, partial(seconds, pause))
        else:
            line.cut()
            seconds(pause)
            line.mend()

    one, other = run(tmp_path, happens)
    assert one == "True"
    assert (other == "True") == ((what, pause) != ("cut", 120.0))
    check(tmp_path)


def test_a_line_that_is_slow_and_loses_packets_is_nobodys_loss(
    tmp_path: Path, patient: None
) -> None:
    bad = partial(cable, 0.02, 0.05)  # 40 ms there and back, and one packet in 20 is lost
    assert run(tmp_path, lambda line, hosts: None, line_of=bad) == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {}


def test_a_clock_that_jumps_is_nobodys_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """A day ahead and an hour back, again and again: ranks go by what does not jump."""
    now, jumps = time.time, itertools.cycle((0.0, 86_400.0, -3600.0))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    assert run(tmp_path, lambda line, hosts: None) == ["True", "True"]
    check(tmp_path)
    assert gone(tmp_path) == {}
