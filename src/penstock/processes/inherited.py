"""Inherited: what a forked process has of its parent, made its own before the job's code goes on.

The job's author has written for one process.  So each process in which the job's code runs - a
rank, a check, one that reads ahead - is to find what it would find in a plain run: the main
process by its name, and open files whose position nobody else moves.
"""

import contextlib
import fcntl
import multiprocessing
import os
import stat
from pathlib import Path

from penstock import _compat

_DESCRIPTORS = Path("/proc/self/fd")
_SAID_TO_ALL = (1, 2)  # what ranks print stands one after the other, in a file too
_PATH_ONLY = getattr(os, "O_PATH", 0)
_KEPT = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_DSYNC | os.O_NOATIME
_OF_DESCRIPTOR = "FLOCK", "OFDLCK"  # locks that end with the last copy of a descriptor


def be_as_plain() -> None:
    """Let this forked process be to the job's code what a plain run is; called first of all.

    It is the main one to `multiprocessing.current_process()` and `parent_process()`, and to what
    it starts itself; positions in files are its own.
    """
    own_positions()
    process = multiprocessing.current_process()
    process.daemon = False  # of the parent; it may have children itself
    process.name = "MainProcess"
    _compat.forget_parent_process()


def own_positions() -> None:
    """Open every inherited file anew, at the same position and under the same number.

    Processes that are forked share the positions of their files: what one of them has read,
    none of the others would read.  Left as they are: what is only written, what is printed to, what
    is locked by its descriptor, and what is no file: pipes, sockets, terminals.
    """
    try:
        numbers = [int(name) for name in os.listdir(_DESCRIPTORS)]
    except OSError:  # no /proc
        return
    printed = {_file(number) for number in _SAID_TO_ALL}
    for number in numbers:
        with contextlib.suppress(OSError):  # that of the list; what may not be opened again
            if _file(number) not in printed and _has_position(number):
                _open_anew(number)


def _file(number: int) -> tuple[int, int] | None:
    """Return what tells one file from another; None: no file is open under this number."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _has_position(number: int) -> bool:
    flags = fcntl.fcntl(number, fcntl.F_GETFL)
    if not stat.S_ISREG(os.fstat(number).st_mode) or flags & _PATH_ONLY:
        return False
    if flags & os.O_ACCMODE == os.O_WRONLY:
        return False
    told = Path(f"/proc/self/fdinfo/{number}").read_text()
    return not any(kind in told for kind in _OF_DESCRIPTOR)


def _open_anew(number: int) -> None:
    flags = fcntl.fcntl(number, fcntl.F_GETFL) & _KEPT
    anew = os.open(_DESCRIPTORS / str(number), flags)
    try:
        os.lseek(anew, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(anew, number, inheritable=os.get_inheritable(number))
    finally:
        os.close(anew)
