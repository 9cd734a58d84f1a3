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
Replaced = list[tuple[str, int]]  # name of each stream, and a descriptor of what took its place


def pipes() -> set[Pipe]:
    """Return the pipes that this process has open to read.

    Not those that it writes to itself and that never block: by these the job's processes tell
    each other something, or take turns; nobody waits for what comes.
    """
    found = [*_pipes()]
    written = {inode for _, inode, flags in found if flags & os.O_ACCMODE == os.O_WRONLY}
    return {
        (number, inode)
        for number, inode, flags in found
        if flags & os.O_ACCMODE == os.O_RDONLY and not (flags & os.O_NONBLOCK and inode in written)
    }


def _pipes() -> Iterator[tuple[int, int, int]]:
    """Yield of each end of a pipe its descriptor, its inode and its flags."""
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            found = os.fstat(int(name))
            if stat.S_ISFIFO(found.st_mode):
                yield int(name), found.st_ino, fcntl.fcntl(int(name), fcntl.F_GETFL)
        except OSError:  # closed meanwhile
            continue


def replaced_streams(given: set[Pipe]) -> Replaced:
    """Let these pipes and standard input be others for the rest of this process; return those."""
    names = {number: _name_of(number) for number, _ in given & pipes()}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # there is none
        names[sys.stdin.fileno()] = "standard input"
    return [(name, _filled(number)) for number, name in names.items()]


def _filled(number: int) -> int:
    """Let a descriptor be of a pipe with empty lines; return another one of the same.

    The job may close its own, and the number be that of another file then.
    """
    out, into = os.pipe()
    os.write(into, _FILLING)
    os.close(into)
    os.dup2(out, number, inheritable=os.get_inheritable(number))
    return out


def streams_read(replaced: Replaced) -> list[str]:
    """Return which of the replaced streams were read."""
    return [name for name, kept in replaced if _waiting(kept) < len(_FILLING)]


def refusal(names: list[str]) -> JobError:
    """Return the error for a job that reads these streams."""
    message = f"the job reads {' and '.join(names)}, which processes that are forked have in common"
    hint = "open it inside `data`, or write it to a file first and read that"
    return JobError(f"{message}: what one of them reads is lost to the others", hint=hint)


def _waiting(number: int) -> int:
    """Return how many bytes of a stream nobody has read; all where it is closed."""
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
