"""Beside: the process beside a rank that writes its checkpoints, as the rank sees it."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

import penstock
from penstock.checkpoints import folders
from penstock.checkpoints.snapshot import Snapshot
from penstock.checkpoints.writer import END, Order, Reply
from penstock.errors import CheckpointError
from penstock.typed import typed

_PATIENCE_S = 600.0  # for a process to end that nobody orders anything any more
_WRITER = "penstock.checkpoints.writer"


class WriterGoneError(CheckpointError):
    """The process is not there any more."""


class Beside:
    """The process beside a rank, and the memory that both share."""

    def __init__(self, order: Order) -> None:
        self.snapshot = Snapshot()
        self.snapshot.grow(order.size_bytes)
        self.lock = folders.shared_lock(Path(order.checkpoints))
        given = self.snapshot.file, self.lock
        found = str(Path(penstock.__file__).parent.parent), os.environ.get("PYTHONPATH", "")
        self.process = subprocess.Popen(
            [sys.executable, "-m", _WRITER, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=given,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
        )
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._has_room = self._is_over = False
        self._send(replace(order, size_bytes=self.snapshot.size_bytes).line())

    @property
    def _out(self) -> Any:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout

    def _send(self, line: bytes) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def say(self, word: bytes) -> None:
        """Say a word about the order that is under way; nobody may be there to hear it."""
        with suppress(WriterGoneError):
            self._send(word)

    def write(self, order: Order, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors and have them written; nothing else is being written.

        Raises:   CheckpointError: there is no memory for the copy.  WriterGoneError.
        """
        if not self._has_room:
            room = self.answer(None)
            self._has_room = True
            assert room is not None, "it was waited for"
            if room.problem:
                raise CheckpointError(room.problem, hint=room.hint)
        if order.size_bytes > self.snapshot.size_bytes:
            self.snapshot.grow(order.size_bytes)
            with folders.writing(order.hidden):
                os.posix_fallocate(self.snapshot.file, 0, order.size_bytes)
        self.snapshot.take(tensors, order.pieces)
        folders.lock(self.lock)
        folders.announce(order.hidden, order.rank)
        self._send(replace(order, size_bytes=self.snapshot.size_bytes).line())

    def answer(self, wait_s: float | None) -> Reply | None:
        """Return the next answer; None where it does not come in `wait_s` seconds.

        Raises:   WriterGoneError.
        """
        if not self._poll.poll(None if wait_s is None else 1000 * wait_s):
            return None
        line = self._out.readline()
        if not line:
            raise self._gone()
        return typed(Reply, json.loads(line))

    def _gone(self) -> WriterGoneError:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"left ({code})"
        hint = "is there enough memory for it? `dmesg` shows kills" if code == -9 else ""
        return WriterGoneError(f"the process that writes checkpoints {how}", hint=hint)

    def let_go(self) -> None:
        """Order no more, and hear no more of what was ordered, as if this process had died.

        It says so, too: where the job's data has forked processes, these hold the pipe open.
        """
        if not self._is_over:
            self._is_over = True
            self.say(END)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None, "it is a pipe"
            with suppress(BrokenPipeError):
                pipe.close()

    def close(self) -> None:
        """Return once the process has written what it was ordered to, and has ended."""
        self.let_go()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.snapshot.close()
        os.close(self.lock)
