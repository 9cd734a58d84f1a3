"""Stuck forks: forked processes that wait for what nobody will ever do.

A forked process has none of the threads of the one that forked it.  Where the job's code waits for
one - a queue that it fills, a pool that was made before - it waits for ever: then every thread of
the process waits for a lock of this process alone, without a limit.  Nobody else can let go of it.

Ignores:  waits with a limit, again and again; locks that processes share, and pipes; systems whose
          kernel does not tell for what a process waits.
"""

import faulthandler
import os
import platform
import re
import signal
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path
from typing import final

_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())
_PRIVATE = 128  # of this process alone
_SIGNAL = signal.SIGRTMIN + 7
_ASKED_S, _SOON_S = 1.0, 0.01
_FRAME = re.compile(r'File "(.+)", line (\d+) in ')
_LIBRARIES = tuple({*sysconfig.get_paths().values(), str(Path(__file__).parent.parent)})
STUCK = (
    "waits for ever{}, for a thread that only the process has that it was forked from: start "
    "threads and pools where they are used, anew at each call"
)


@final
class StuckWatch:
    """Tells whether one forked process is stuck, and where; made before it is forked."""

    def __init__(self) -> None:
        self._file = os.memfd_create("penstock lines")
        self._is_closed = False
        self._was_stuck = False

    def begin(self) -> None:
        """Let this process, which is watched, say where it is when it is asked."""
        faulthandler.register(_SIGNAL, file=self._file, all_threads=False)

    def is_stuck(self, pid: int) -> bool:
        """Return whether the process is, now and when it was asked for last."""
        was, self._was_stuck = self._was_stuck, _waits(pid)
        return was and self._was_stuck

    def words(self, pid: int) -> str:
        """Return what a stuck process does, and at which line of the author's."""
        with suppress(OSError):
            os.kill(pid, _SIGNAL)
            until = time.monotonic() + _ASKED_S
            while not os.fstat(self._file).st_size and time.monotonic() < until:
                time.sleep(_SOON_S)
            time.sleep(_SOON_S)
            text = os.pread(self._file, 2**16, 0).decode(errors="replace")
            for path, line in _FRAME.findall(text):
                if not path.startswith((*_LIBRARIES, "<", sys.prefix)):
                    return STUCK.format(f" at {path}:{line}")
        return STUCK.format("")

    def close(self) -> None:
        """Forget the process; a second time nothing: the number may be another file's by then."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._file)


def _waits(pid: int) -> bool:
    """Return whether all threads of a process wait for locks of it, without a limit."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        calls = [(thread / "syscall").read_text().split() for thread in threads]
    except OSError:
        return False
    return bool(calls) and all(map(_is_wait, calls))


def _is_wait(call: list[str]) -> bool:
    if len(call) < 5 or call[0] != _FUTEX:
        return False
    return bool(int(call[2], 16) & _PRIVATE) and int(call[4], 16) == 0
