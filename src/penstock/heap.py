"""Heap: let this process keep the memory that it frees.

By default glibc returns large blocks to the kernel when they are freed, and gets them
again, page by page and zeroed, at the next step: 1,200 to 4,000 page faults in a micro-batch of 30
to 130 ms of the models of bench/zoo.py, up to a third of its time.  Which steps pay depends on what
happens to lie at the end of the heap, so it cannot be predicted either.  A training step takes
the same blocks again and again: the process grows to its peak once and stays there.
"""

import ctypes
import sys
from typing import Any

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of <malloc.h>
_NEVER, _NO_BLOCK = -1, 0


def keep_freed_memory() -> bool:
    """Keep from now on what is freed in this process; return whether that is known to work.

    It works with glibc; elsewhere nothing is done.
    """
    mallopt = _of_libc("mallopt")
    if mallopt is None:
        return False
    return mallopt(_TRIM_THRESHOLD, _NEVER) == 1 and mallopt(_MMAP_MAX, _NO_BLOCK) == 1


def give_back() -> None:
    """Return once what this process has freed; ranks forked from it then begin without it."""
    malloc_trim = _of_libc("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _of_libc(name: str) -> Any:
    """Return a function of the C library, or None if there is none of that name."""
    known = sys.platform.startswith("linux")
    return getattr(ctypes.CDLL(None), name, None) if known else None
