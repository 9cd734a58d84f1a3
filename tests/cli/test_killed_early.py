"""Killed early: whatever of an elastic command is killed before its first step leaves nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.conftest import Call

ROOT = Path(__file__).parents[2]
COMMAND = "train", "tests.cli.mlp:job", "--elastic", "--ranks", "2", "--steps", "8", "--out"
LIMIT_S = 100.0


def below(pid: int) -> set[int]:
    """Return all processes that a process has started, and those that they have."""
    found = set[int]()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= set(map(int, path.read_text().split()))
    return found.union(*map(below, found))


def until(is_so: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end, "it never is"
        time.sleep(0.01)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("who", ["the command", "one that it has started"])
@pytest.mark.parametrize(
    "phase", ["examining the job", "tracing the step", "searching", "comparing two steps", "trying"]
)
def test_what_is_killed_before_the_first_step_leaves_nothing_and_it_can_begin_again(
    phase: str, who: str, tmp_path: Path, profiles: Path, call: Call
) -> None:
    folder, shared, told = tmp_path / "run", {*os.listdir("/dev/shm")}, tmp_path / "said"
    known = {"XDG_CACHE_HOME": str(profiles), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with told.open("w") as file:
        program = subprocess.Popen(
            [sys.executable, "-m", "penstock", *COMMAND, str(folder)],
            stderr=file,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **known},
            start_new_session=True,
        )
    seen = set[int]()
    try:
        until(lambda: phase in told.read_text() or program.poll() is not None)
        if who != "the command":
            until(lambda: below(program.pid) or program.poll() is not None)
        seen |= below(program.pid)
        for victim in [program.pid] if who == "the command" else [*seen][:1]:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(victim, signal.SIGKILL)
        while program.poll() is None:
            seen |= below(program.pid)
            time.sleep(0.01)
        until(lambda: not any(_runs(pid) for pid in seen))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    until(lambda: {*os.listdir("/dev/shm")} <= shared)
    if program.returncode not in (0, -signal.SIGKILL):
        assert "\nerror: " in told.read_text(), told.read_text()
        assert "Traceback" not in told.read_text(), told.read_text()
        assert "hint: the lines above" not in told.read_text(), told.read_text()
    if program.returncode:
        done = call(*COMMAND, folder)
        assert done.code == 0, done.err


def _runs(pid: int) -> bool:
    """Return whether a process is there, and no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
