"""Streams: pipes and standard input, which a job can read once and in one process only.

A file is opened anew in each process; a pipe is not: what a check reads of it the run has lost,
and of two ranks each reads what the other does not.  So while a job is examined its pipes are
replaced by others that are filled with empty lines, and it is seen whether those are read.
"""

import array
import contextlib
import fcntl
import io
import os
import stat
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from penstock.errors import JobError
from penstock.job import is_users

_FILLING = b"\n" * 4096  # less than any pipe holds


Pipe = tuple[int, int]  # its descriptor, and what tells it from a later one of the same number


def pipes() -> set[Pipe]:
    """Return the pipes that this process has open to read."""
    return {*_pipes()}


def _pipes() -> Iterator[Pipe]:
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found = os.fstat(int(name))
            is_pipe = stat.S_ISFIFO(found.st_mode)
            if is_pipe and fcntl.fcntl(int(name), fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                yield int(name), found.st_ino
        except OSError:  # closed meanwhile
            continue


def replaced_streams(given: set[Pipe]) -> dict[int, str]:
    """Let these pipes and standard input be others for the rest of this process; return names."""
    names = {number: _name_of(number) for number, _ in given & pipes()}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none
        names[sys.stdin.fileno()] = "standard input"
    for number in names:
        out, into = os.pipe()
        os.write(into, _FILLING)
        os.close(into)
        os.dup2(out, number)
        os.close(out)
    return names


def streams_read(names: dict[int, str]) -> list[str]:
    """Return which of the replaced streams were read."""
    return [name for number, name in names.items() if _waiting(number) < len(_FILLING)]


def refusal(names: list[str]) -> JobError:
    """Return the error for a job that reads these streams."""
    message = f"the job reads {' and '.join(names)}, which processes that are forked have in common"
    hint = "open it inside `data`, or write it to a file first and read that"
    return JobError(f"{message}: what one of them reads is lost to the others", hint=hint)


def _waiting(number: int) -> int:
    """Return how many bytes of a stream nobody has read; none where it was closed."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(number, termios.FIONREAD, count)
    except OSError:
        return len(_FILLING)
    return count[0]


def _name_of(number: int) -> str:
    """Return by which name the user's modules know a pipe."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not is_users(file):
            continue
        for name, value in list(vars(module).items()):
            source = value.stdout if isinstance(value, subprocess.Popen) else value
            if isinstance(source, io.IOBase) and not source.closed and _number(source) == number:
                return f"the pipe {name} of {Path(file).name}"
    return "a pipe that was opened before"


def _number(source: io.IOBase) -> int:
    try:
        return source.fileno()
    except OSError:  # it is not one of the system's
        return -1
