"""What tests of the command line share: the way in, and one folder for measured profiles."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock.cli import main

MLP = Path(__file__).with_name("mlp.py")
PENSTOCK = (sys.executable, "-c", "import sys; from penstock.cli import main; sys.exit(main())")


class Done(NamedTuple):
    """How a command ended.

    err:    but for what told that something was done.
    """

    code: int
    out: str
    err: str

    def refusal(self, code: int) -> tuple[str, str]:
        """Return error and hint, after the checks that hold for every refusal."""
        assert self.code == code, self
        assert self.out == "" or json.loads(self.out).keys() >= {"error", "hint"}
        assert "Traceback" not in self.err
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        hints = [line for line in lines if line.startswith("hint: ")]
        assert (len(errors), len(hints)) == (1, 1), self.err
        between = lines[lines.index(errors[0]) + 1 : lines.index(hints[0])]
        assert lines[-1] == hints[0]
        assert all(re.match(r"  \S|  +", line) for line in between), self.err
        assert len(errors[0]) > len("error: ")
        assert len(hints[0]) > len("hint: ")
        return errors[0].removeprefix("error: "), hints[0].removeprefix("hint: ")


Call = Callable[..., Done]


@pytest.fixture(autouse=True)
def _buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands keep stdout in a buffer, as Python does where nothing says otherwise."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of profiles of the whole session: each is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def call(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, profiles: Path
) -> Call:
    """Return a function that runs a command in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(profiles))

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        lines = err.splitlines(keepends=True)
        return Done(code, out, "".join(line for line in lines if not line.endswith(" ...\n")))

    return run


@contextmanager
def little_room(most: int) -> Iterator[None]:
    """Let this process and its ranks write no file of more than so many bytes.

    What a command prints to `call` is written to a file too: leave room for it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def spawn(profiles: Path) -> Call:
    """Return a function that runs a command as a process of its own."""

    def run(*arguments: object, env: Mapping[str, str] | None = None, **more: object) -> Done:
        shared = {**os.environ, "XDG_CACHE_HOME": str(profiles), **(env or {})}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        command = [*PENSTOCK, *map(str, arguments)]
        done = subprocess.run(command, text=True, env=shared, check=False, **options)
        return Done(done.returncode, done.stdout or "", done.stderr or "")

    return run
