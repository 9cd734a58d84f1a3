"""Lock: one run at a time writes into a folder; the kernel releases it when that one ends."""

import contextlib
import fcntl
import json
import os
import platform
import struct
import time
from collections.abc import Generator
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.errors import RunError

NAME = ".lock"
_FLOCK = struct.Struct("@hhqqi0q")  # struct flock of Linux, where offsets have 64 bits


class Holder(msgspec.Struct, frozen=True):
    """The process that holds the lock of a folder."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
    host: str
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.started}"


@contextlib.contextmanager
def locked(folder: Path) -> Generator[None]:
    """Hold the lock of a run's folder, which is made if need be; it says who holds it.

    Nothing is left of a new folder that is still empty at the end.  Processes that are forked
    meanwhile do not hold the lock: it ends with this process, however that ends.
    Raises:   RunError: another run holds it.
    """
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    file = _taken(path)
    try:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(_own()).encode(), 0)
        yield
    finally:
        with contextlib.suppress(OSError):  # nobody may write there any more
            path.unlink(missing_ok=True)
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(file)


def _taken(path: Path) -> int:
    """Return the open file whose lock this process holds now."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except (BlockingIOError, PermissionError) as problem:
            holder = _holder(file)
            os.close(file)
            raise in_use(path.parent, holder) from problem
        os.close(file)  # who held it has just ended, and took the file away


def in_use(folder: Path, holder: str) -> RunError:
    """Return the error of who would write where another run does."""
    hint = "wait for that run to end, or give this one another folder: out=DIR"
    return RunError(f"{folder} is in use by {holder}", hint=hint)


def is_held(folder: Path) -> bool:
    """Return whether the process that holds the lock of a folder is there, as far as known here.

    It is read, not tried: who tries to take it may keep a run from beginning.
    """
    holder = holder_of(folder)
    return holder is not None and is_here(holder) and may_be_there(holder)


def holder_of(folder: Path) -> Holder | None:
    """Return who holds the lock of a folder, or held it when it was killed; None: nobody."""
    try:
        return _told((folder / NAME).read_bytes())
    except OSError:
        return None


def is_here(holder: Holder) -> bool:
    """Return whether somebody is a process of this host."""
    return holder.host == platform.node()


def may_be_there(holder: Holder) -> bool:
    """Return whether a process may be alive: of another host nobody knows."""
    if not is_here(holder):
        return True
    try:
        os.kill(holder.pid, 0)
    except PermissionError:  # it is another user's
        return True
    except (OSError, OverflowError):
        return False
    return True


def holding_pid(folder: Path) -> int | None:
    """Return the process of this host that the kernel says holds the lock; None: there is none."""
    try:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return None
    finally:
        os.close(file)
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def _own() -> dict[str, object]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": platform.node(), "started": started}


def _holder(file: int) -> str:
    """Return who holds the lock, as far as the file says."""
    return str(_told(os.pread(file, 4096, 0)) or "another run")


def _told(text: bytes) -> Holder | None:
    try:
        return msgspec.json.decode(text, type=Holder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
