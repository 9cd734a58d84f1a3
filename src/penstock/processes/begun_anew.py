"""Begun anew: this process's command once more, beside it, to do something else.

What has looked at an accelerator has no forks that can use it.  The command itself has all that a
fork would have: the author's files, read by the same code.  It learns from its environment what it
is asked for, and answers through a pipe; whatever it prints is read only where it dies.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, final

from penstock.errors import RunError
from penstock.processes.end_with_parent import die_with
from penstock.processes.started import ASKED

_LAST = 2_000  # characters of what it has said
_END_S = 30.0  # for which it may still go on once it has answered


@final
class BegunAnew:
    """The command, begun anew.

    asked:    what is asked of it, as JSON values.
    files:    that it has under the same numbers.
    index:    of the accelerator that is its own.
    """

    def __init__(self, asked: Mapping[str, object], files: Sequence[int], index: int) -> None:
        question = os.memfd_create("penstock asked")
        os.write(question, json.dumps(asked).encode())
        receiver, sender = os.pipe()
        own = {ASKED: f"{question} {sender}", "LOCAL_RANK": str(index)}
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with this
        self._process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._said,
            pass_fds=(*files, question, sender),
            start_new_session=True,  # a signal to the group is for who began it
            preexec_fn=partial(die_with, os.getpid()),
        )
        os.close(question)
        os.close(sender)
        self._receiver = Connection(receiver, writable=False)

    @property
    def pid(self) -> int:
        """Return the number of the process."""
        return self._process.pid

    def poll(self, limit_s: float = 0.0) -> tuple[Any, ...] | None:
        """Return its answer as the only one of a row; None: there is none yet.

        limit_s:  for which it is waited for.
        Raises:   RunError: it has died, or failed.
        """
        if not self._receiver.poll(limit_s):
            return None
        try:
            content = json.loads(self._receiver.recv_bytes())
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            return (content,)
        except EOFError:
            self._process.wait()
            raise RunError(self._last_words()) from None
        finally:
            self.close()

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = self._said.read()[-_LAST:].decode(errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith("error:")] or lines[-1:]
        return ": ".join([f"it ended with {self._process.returncode}", *errors[-1:]])

    def close(self) -> None:
        """End the process with all that it has begun, if it is still there."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._receiver.close()
        self._said.close()


def asked_beside() -> dict[str, Any]:
    """Return what this process is asked for."""
    file, _ = map(int, os.environ[ASKED].split())
    return json.loads(os.pread(file, os.fstat(file).st_size, 0))


def answer_beside(content: object) -> None:
    """Answer what this process was asked, with JSON values."""
    _, file = map(int, os.environ[ASKED].split())
    Connection(os.dup(file), readable=False).send_bytes(json.dumps(content).encode())
