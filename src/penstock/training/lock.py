"""Lock: one run at a time writes into a folder; the kernel releases it when that one ends."""

import contextlib
import fcntl
import json
import os
import platform
import time
from collections.abc import Generator
from pathlib import Path

from penstock.errors import RunError

NAME = ".lock"


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
            message = f"{path.parent} is in use by {_holder(file)}"
            os.close(file)
            hint = "wait for that run to end, or give this one another --out"
            raise RunError(message, hint=hint) from problem
        os.close(file)  # who held it has just ended, and took the file away


def is_held(folder: Path) -> bool:
    """Return whether the process that holds the lock of a folder is there, as far as known here.

    It is read, not tried: who tries to take it may keep a run from beginning.
    """
    try:
        told = json.loads((folder / NAME).read_text())
        if told["host"] != platform.node():
            return False
        os.kill(told["pid"], 0)
    except PermissionError:  # it is another user's
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def _own() -> dict[str, object]:
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"pid": os.getpid(), "host": platform.node(), "started": started}


def _holder(file: int) -> str:
    """Return who holds the lock, as far as the file says."""
    try:
        told = json.loads(os.pread(file, 4096, 0))
        return f"process {told['pid']} on {told['host']}, since {told['started']}"
    except (ValueError, KeyError, TypeError):
        return "another run"
