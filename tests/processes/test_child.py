"""A forked process gives its answer, its error, or is gone."""

import os
import signal

import pytest

from penstock.errors import JobError, RunError
from penstock.processes.child import SilentError, in_a_fork
from tests.runtime.test_launch import children, has_ended


@pytest.fixture(autouse=True)
def _nothing_is_left():
    before = children(os.getpid())
    yield
    assert children(os.getpid()) == before


def test_answer_comes_back_and_nothing_else_changes():
    seen = []

    def call(beat):
        seen.append(1)
        beat()
        return {"pid": os.getpid(), "seen": seen}

    found = in_a_fork(call, 30)
    assert found["pid"] != os.getpid()
    assert (found["seen"], seen) == ([1], [])


def test_its_errors_are_raised_here():
    def refuses(beat):
        raise JobError("not today", hint="tomorrow")

    with pytest.raises(JobError, match="not today") as caught:
        in_a_fork(refuses, 30)
    assert caught.value.hint == "tomorrow"
    with pytest.raises(RunError, match="ZeroDivisionError"):
        in_a_fork(lambda beat: 1 // 0, 30)


def test_its_death_is_told():
    with pytest.raises(RunError, match="killed by signal 9"):
        in_a_fork(lambda beat: os.kill(os.getpid(), signal.SIGKILL), 30)


def test_it_is_killed_when_it_is_silent_and_left_alone_while_it_is_not():
    def waits(beat):
        beat()
        signal.pause()

    with pytest.raises(SilentError, match="silent for 0 s"):
        in_a_fork(waits, 0.2)


def test_it_may_have_children_that_do_not_outlive_it():
    def forks(beat):
        pid = os.fork()
        if not pid:
            signal.pause()
        return pid

    assert has_ended(in_a_fork(forks, 30))


def test_one_that_is_killed_names_the_signal_and_what_may_have_sent_it():
    def dies(beat):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunError, match="was killed by signal 9") as caught:
        in_a_fork(dies, 30)
    assert "memory" in caught.value.hint
    assert "dmesg" in caught.value.hint

    def crashes(beat):
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunError, match="was killed by signal 15") as caught:
        in_a_fork(crashes, 30)
    assert "dmesg" not in caught.value.hint
