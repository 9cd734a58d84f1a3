"""A script is given its own arguments, never Penstock's."""

import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import JobError
from penstock.job import load_job
from penstock.script import Script, as_started, script_of, with_arguments

HEAD = """
import argparse, sys
import penstock as ps
from torch import nn

def make(**fields):
    return ps.Job(nn.Identity, lambda m, b: m(b).sum(), iter, list, **fields)
"""
AT_TOP = """
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=3)
arguments = parser.parse_args()

def job(): return make(num_steps=arguments.steps)
"""
IN_JOB = """
def job():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    return make(num_steps=parser.parse_args().steps)
"""
BY_HAND = "def job(): return make(num_steps=int((sys.argv[2:] or ['3'])[0]))\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(body: str, name: str = "file.py") -> Path:
        path = tmp_path / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


@pytest.fixture(autouse=True)
def penstocks_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", "train", "file.py", "--steps", "100"])
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.parametrize("body", [AT_TOP, IN_JOB, BY_HAND])
def test_script_reads_its_own_arguments_and_never_ours(write, body: str) -> None:
    path = write(body)
    assert load_job(str(path)).num_steps == 3
    assert load_job(f"{path} -- --steps 8").num_steps == 8
    assert load_job(f"{path}:job -- --steps 8").num_steps == 8
    assert sys.argv[0] == "penstock"


def test_argv_begins_with_the_script_as_python_has_it(write) -> None:
    path = write("def job(): return make(facts=lambda: sys.argv)\nSEEN = [*sys.argv]\n")
    load_job(f"{path}:job -- --name 'two words'")
    seen = sys.modules["file"].SEEN
    assert seen == [str(path), "--name", "two words"]
    with as_started(f"{path}:job -- -x"):
        assert sys.argv == [str(path), "-x"]
    with as_started(""):  # a job that is no script's
        assert sys.argv[0] == "penstock"


@pytest.mark.parametrize("body", [AT_TOP, IN_JOB])
@pytest.mark.parametrize(
    ("given", "said"),
    [("--pace 3", "unrecognized arguments: --pace 3"), ("--steps many", "invalid int value")],
)
def test_what_a_parser_does_not_take_is_one_error_with_its_words(
    write, body: str, given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(body)
    with pytest.raises(JobError) as caught:
        load_job(f"{path} -- {given}")
    first, *rest = caught.value.message.splitlines()
    assert first.startswith(f"{path}:")
    assert said in first
    assert rest == ["usage: file.py [-h] [--steps STEPS]"]
    assert f"{path} -- --name value" in caught.value.hint
    assert capsys.readouterr() == ("", "")


def test_parser_of_another_kind_that_ends_the_script_hints_at_arguments(write) -> None:
    with pytest.raises(JobError, match=r"py:\d+: SystemExit: 2") as caught:
        load_job(str(write("sys.exit(2)\n")))
    assert "behind ` -- `" in caught.value.hint


def test_script_that_ends_before_it_has_a_job_is_told_so(write) -> None:
    with pytest.raises(JobError, match="it ends before there is a job") as caught:
        load_job(str(write("sys.exit(0)\n")))
    assert "__main__" in caught.value.hint


def test_parsers_print_and_end_as_ever_once_the_script_is_loaded(write) -> None:
    import argparse

    before = argparse.ArgumentParser.error
    load_job(str(write(AT_TOP)))
    assert argparse.ArgumentParser.error is before


words = st.text(st.characters(codec="utf-8"), max_size=8)


@given(st.lists(words, max_size=4), st.lists(words, max_size=4))
def test_arguments_are_read_back_whatever_they_are(first: list[str], more: list[str]) -> None:
    text = str(Script("file.py:job", tuple(first)))
    assert script_of(text) == ("file.py:job", tuple(first))
    assert script_of(with_arguments(text, more)) == ("file.py:job", (*first, *more))


@pytest.mark.parametrize(
    ("job", "place"),
    [("a/b.py", "a/b.py"), ("a/b.py:c", "a/b.py"), ("p.q:c", "p.q"), ("c:/a.py", "c:/a.py")],
)
def test_place_is_without_the_functions_name(job: str, place: str) -> None:
    assert Script(job).place == place


def test_missing_quotation_mark_is_told() -> None:
    with pytest.raises(JobError, match="quotation"):
        load_job("file.py -- 'a")
