"""End with parent: whether a process outlives the one that has forked it."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when `parent`, which has forked it, has died."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Let this process live on when the one that has forked it dies, whatever was said before."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0)
