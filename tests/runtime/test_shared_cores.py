"""Shared cores: where the core changes hands, who has it, and what a run that is killed leaves."""

import fcntl
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.runtime import shared_cores
from penstock.runtime.calls import Bound
from penstock.runtime.shared_cores import CoreTerms, await_start, in_turns, parse_turns

LANES = "compute", "update", "begin", "versions", "post", "send", "take", "collective", "data"
lists = st.lists(st.sampled_from(LANES))


def bound(lane: str, call=lambda: None) -> Bound:
    return Bound(call, lane, "F", 0, 0)


def played(lanes: list[str], folder: Path, *, is_first: bool) -> list[tuple[str, bool]]:
    """Return what was called in order, and whether the core's lock was held meanwhile."""
    seen: list[tuple[str, bool]] = []

    def look(lane: str) -> None:
        own = os.open(folder / "core-0", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append((lane, False))
        except BlockingIOError:
            seen.append((lane, True))
        finally:
            os.close(own)

    calls = [bound(lane, lambda lane=lane: look(lane)) for lane in lanes]
    for each in in_turns(calls, CoreTerms(is_first, folder), 0):
        each.call()
    return seen


@given(lists, st.booleans())
def test_computes_have_the_core_and_what_may_wait_has_not(tmp_path_factory, lanes, is_first):
    seen = played(lanes, tmp_path_factory.mktemp("cores"), is_first=is_first)
    assert [lane for lane, _ in seen] == lanes
    for lane, held in seen:
        if lane in ("compute", "update"):
            assert held
        if lane in ("send", "take", "collective", "data"):
            assert not held


def test_first_keeps_the_core_until_it_may_wait_and_the_second_from_compute_to_compute(tmp_path):
    lanes = ["compute", "begin", "compute", "versions", "collective", "update", "update"]
    hands = {}
    for is_first in True, False:
        calls = in_turns([*map(bound, lanes)], CoreTerms(is_first, tmp_path), 0)
        hands[is_first] = " ".join(each.lane[0] for each in calls)
    assert hands[True] == "t c b c t v c t u u t"
    assert hands[False] == "t c t b t c t v c t u t t u t"


def test_run_of_its_own_is_as_it_was():
    calls = [bound("compute"), bound("send")]
    assert in_turns(calls, None, 0) == calls


def test_core_of_a_killed_run_is_let_go(tmp_path):
    """A process that holds it is killed; the other run computes at once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        take = in_turns([bound("compute")], CoreTerms(True, tmp_path), 0)[0]
        take.call()
        os.write(writer, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reader, 1)
    with pytest.raises(BlockingIOError):
        fcntl.flock(os.open(tmp_path / "core-0", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert played(["compute"], tmp_path, is_first=False) == [("compute", True)]


def test_second_goes_on_without_where_the_first_holds_the_core_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_cores, "_PATIENCE_S", 0.01)
    in_turns([bound("compute")], CoreTerms(True, tmp_path), 0)[0].call()
    done: list[bool] = []
    calls = in_turns([bound("compute", lambda: done.append(True))], CoreTerms(False, tmp_path), 0)
    waiting = threading.Thread(target=lambda: [each.call() for each in calls], daemon=True)
    waiting.start()
    waiting.join(20)
    assert done == [True]


def test_both_wait_behind_the_gate_of_who_has_started_them(tmp_path):
    gate = os.open(tmp_path / "gate", os.O_RDWR | os.O_CREAT)
    fcntl.flock(gate, fcntl.LOCK_EX)
    over: list[bool] = []

    def begin(is_first: bool) -> None:
        await_start(CoreTerms(is_first, tmp_path), 7)
        over.append(is_first)

    threads = [threading.Thread(target=begin, args=(each,)) for each in (True, False)]
    for thread in threads:
        thread.start()
    while len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.001)
    assert over == []
    assert (tmp_path / "ready-first").read_text() == "7"
    os.close(gate)
    for thread in threads:
        thread.join()
    assert sorted(over) == [False, True]


def test_run_that_nobody_has_started_with_another_begins_at_once(tmp_path):
    await_start(CoreTerms(True, tmp_path / "cores"), 1)


def test_turns_are_said_with_a_folder():
    assert parse_turns("second:/tmp/cores") == CoreTerms(False, Path("/tmp/cores"))
    for text in "first", "third:/tmp", "first:", "":
        with pytest.raises(PlanError, match="turns is"):
            parse_turns(text)
