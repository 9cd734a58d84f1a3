"""Nursery: forks `penstock` on rehearsal GPUs out of a process that has loaded all it takes.

To load torch and Penstock takes a processor some seconds, three times where a command starts two
ranks.  Nothing here has looked at a device, so that its forks may: a command, and before that does
anything itself one for each rank that it may start (local_ranks.py), as begun anew as can be.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any

from tests.rehearsal import cuda, launcher

# isort: split
import torch._dynamo  # noqa: F401 - the first optimizer loads it

from penstock.cli import main
from penstock.cli import train as _train  # noqa: F401
from penstock.examine.alive import set_apart
from penstock.processes.child import die_with
from penstock.training import local_ranks, torchrun  # noqa: F401

_MOST_BYTES = 1 << 18  # of a message: an environment, and what a command is given
_STARTS = 2  # of ranks by one command: by a plan, and without one


class Seed:
    """A fork that waits to be a rank, with those methods of a `subprocess.Popen` that are used."""

    def __init__(self, arguments: Sequence[str], older: Sequence["Seed"]) -> None:
        self.returncode: int | None = None
        self.socket, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        home = os.getpid()
        self.pid = os.fork()
        if self.pid:
            own.close()
            return
        for each in (*older, self):  # so that each sees when the command has ended
            each.socket.close()
        content, files, _, _ = socket.recv_fds(own, _MOST_BYTES, 2)
        if not content:
            os._exit(0)
        os.setsid()
        die_with(home)
        _be(json.loads(content), files)
        sys.exit(main(arguments))

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        return self._looked(os.WNOHANG)

    def wait(self) -> int | None:
        return self._looked(0)

    def _looked(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _be(environment: dict[str, str], files: Sequence[int]) -> None:
    """Let this fork be a process of its own, with its devices and what it writes to."""
    os.environ.clear()
    os.environ.update(environment)
    nothing = os.open(os.devnull, os.O_RDWR)
    for own, number in zip((nothing, *files), (0, 1, 2), strict=True):
        os.dup2(own, number)
        os.close(own)
    random.seed()
    cuda.COUNT = int(environment["REHEARSAL_GPUS"])
    cuda.TOTAL_BYTES = int(environment["REHEARSAL_BYTES"])
    cuda.library.rehearsal_begin(cuda.COUNT, cuda.TOTAL_BYTES)
    launcher._starter = os.getpid()


def _run(asked: dict[str, Any], files: Sequence[int]) -> int:
    """Return how the command ends that is asked for, in this fork."""
    arguments = asked["arguments"]
    _be(asked["environment"], files)
    os.chdir(asked["folder"])
    sys.argv = [str(launcher.__file__), *arguments]
    sys.orig_argv[1:] = ["-m", launcher.__name__, *arguments]
    waiting: list[Seed] = []
    for _ in range(_STARTS * cuda.COUNT if cuda.COUNT > 1 else 0):
        waiting.append(Seed(arguments, waiting))

    def started(command: Sequence[str], *, env: dict[str, str], **given: Any) -> Seed:
        seed = waiting.pop(0)
        with open(os.devnull, "wb") as nothing:
            ways = {None: 1, subprocess.DEVNULL: nothing.fileno()}
            out, err = given["stdout"], given["stderr"]
            told: IO[bytes] | int = 2 if err is None else err
            files = [ways[out], told if isinstance(told, int) else told.fileno()]
            socket.send_fds(seed.socket, [json.dumps(env).encode()], files)
        return seed

    local_ranks.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=started, DEVNULL=subprocess.DEVNULL
    )
    return main(arguments)


def serve() -> None:
    """Run the commands that come over stdin, one after another, until it is closed."""
    place = socket.socket(fileno=os.dup(0))
    set_apart()
    while True:
        content, files, _, _ = socket.recv_fds(place, _MOST_BYTES, 2)
        if not content:
            return
        pid = os.fork()
        if not pid:
            place.close()
            sys.exit(_run(json.loads(content), files))
        for file in files:
            os.close(file)
        place.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


if __name__ == "__main__":
    serve()
