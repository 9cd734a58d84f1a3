"""Command: `penstock` on rehearsal GPUs in processes of its own, and what these saw."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import penstock
from tests.rehearsal.library import CUDA, built, cache_folder

ROOT = Path(__file__).parent.parent.parent
SRC = Path(penstock.__file__).parent.parent  # what is tested, which may be a copy
LIMIT_S = 360.0
PATHS = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(SRC))), "OMP_NUM_THREADS": "1"}
_LAUNCHER = ("-m", "tests.rehearsal.launcher")


@dataclass(frozen=True)
class Rehearsed:
    """What a command gave, and the rows of its processes (launcher.py)."""

    code: int
    text: str
    rows: tuple[dict[str, Any], ...]

    @property
    def windows(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["kind"] == "window"]

    @property
    def kept(self) -> list[dict[str, Any]]:
        """Return what keeping steps for audits has cost, before and after each."""
        return [row for row in self.rows if row["kind"] == "kept"]

    @property
    def races(self) -> list[str]:
        return [race for row in self.rows for race in row["races"]]

    @property
    def devices(self) -> set[int]:
        """Return the numbers of the devices on which steps were made."""
        return {row["device"] for row in self.windows}

    @property
    def last_windows(self) -> list[dict[str, Any]]:
        """Return the newest window of each process that has made one: all is warm by then."""
        return list({row["pid"]: row for row in self.windows}.values())


def rehearse(
    arguments: Sequence[str],
    folder: Path,
    *,
    gpus: int = 1,
    bytes_of_each: int = 1 << 30,
    kind: str = CUDA,
    wrong: int = 0,
) -> Rehearsed:
    """Run `penstock ARGUMENTS` on so many rehearsal GPUs; nothing of other runs is found again.

    wrong:     the window of a run before which a weight goes wrong; 0: none does.
    kind:      what torch calls such a device; Penstock knows it, unless it is "idle".
    """
    seen = folder / "seen"
    seen.mkdir(parents=True, exist_ok=True)
    own = {"REHEARSAL_GPUS": str(gpus), "REHEARSAL_BYTES": str(bytes_of_each)}
    own |= {"REHEARSAL_KIND": kind, "REHEARSAL_WRONG": str(wrong)}
    own |= {"REHEARSAL_SEEN": str(seen), "REHEARSAL_CACHE": str(cache_folder())}
    built(kind)
    own["XDG_CACHE_HOME"] = str(folder / "cache")
    environment = {**os.environ, **own, **PATHS}
    run = _forked if kind == CUDA else _begun
    code, text = run(arguments, folder, environment)
    files = sorted(seen.glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for file in files:
        file.unlink()
    return Rehearsed(code, text, tuple(rows))


def _begun(arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command as a process that is begun anew; return its code, and what it said."""
    done = subprocess.run(
        [sys.executable, *_LAUNCHER, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout + done.stderr


def _forked(arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command as a fork of the nursery; return its code, and what it said."""
    asked = {"arguments": arguments, "folder": str(folder), "environment": environment}
    said = [folder / "said.out", folder / "said.err"]
    with said[0].open("wb") as out, said[1].open("wb") as err:
        content = json.dumps(asked).encode()
        socket.send_fds(nursery().way, [content], [out.fileno(), err.fileno()])
    code = int(nursery().way.recv(64) or 1)
    return code, "".join(each.read_text() for each in said)


class Nursery(NamedTuple):
    """A process that runs commands as forks of its own (nursery.py), and the way to it."""

    process: "subprocess.Popen[bytes]"
    way: socket.socket

    def end(self) -> None:
        self.way.close()
        self.process.wait(LIMIT_S)


@cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.settimeout(LIMIT_S)
    environment = {**os.environ, **PATHS, "REHEARSAL_CACHE": str(cache_folder())}
    command = [sys.executable, "-m", "tests.rehearsal.nursery"]
    with other:
        process = subprocess.Popen(
            command, stdin=other.fileno(), env=environment, start_new_session=True
        )
    return Nursery(process, own)
