"""A command that is begun anew learns what is asked of it, answers once, and leaves nothing."""

import os
import sys
from contextlib import closing

import pytest

from penstock.errors import RunError
from penstock.processes.begun_anew import BegunAnew
from penstock.processes.started import is_asked_beside

ANSWERS = """
import os, sys
from penstock.processes.begun_anew import answer_beside, asked_beside
from penstock.processes.started import is_asked_beside
asked = asked_beside()
print("whatever the author's code prints")
told = os.pread(asked["file"], 99, 0).decode()
answer_beside([is_asked_beside(), asked["number"], told, os.environ["LOCAL_RANK"]])
"""
FAILS = "import sys; sys.exit('error: no such file\\nhint: give another')"
SLEEPS = "import time; time.sleep(600)"


def begun(program: str, monkeypatch: pytest.MonkeyPatch, *files: int, **asked: int) -> BegunAnew:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", program])
    return BegunAnew(asked, files, 3)


def answered(process: BegunAnew) -> object:
    while (told := process.poll(1.0)) is None:
        pass
    return told[0]


def test_it_is_asked_and_answers_with_the_files_that_it_was_given(monkeypatch):
    file = os.memfd_create("told")
    os.write(file, b"in a file")
    process = begun(ANSWERS, monkeypatch, file, file=file, number=7)
    assert answered(process) == [True, 7, "in a file", "3"]
    assert not is_asked_beside()
    os.close(file)


def test_what_it_says_is_told_where_it_fails(monkeypatch):
    process = begun(FAILS, monkeypatch)
    with pytest.raises(RunError, match="it ended with 1: error: no such file"), closing(process):
        answered(process)


def test_it_is_gone_once_it_is_closed(monkeypatch):
    process = begun(SLEEPS, monkeypatch)
    assert process.poll() is None
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
