"""Huge pages for what a process of tests holds: a fork copies one entry for 512."""

import ctypes
from pathlib import Path

_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; refused by others, which changes nothing
_LEAST = 2 << 20  # bytes of a huge page
_LIBC = ctypes.CDLL(None)
_LIBC.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def collapse() -> None:
    """Put private memory that is no file's into huge pages, as far as it fills them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, file, *name = line.split(maxsplit=5)
        first, end = (int(part, 16) for part in place.split("-"))
        ours = file == "0" and (not name or name == ["[heap]"])
        if ours and rights == "rw-p" and end - first >= _LEAST:
            begin = -first % _LEAST + first
            for at in range(begin, end - _LEAST + 1, _LEAST):
                _LIBC.madvise(at, _LEAST, _COLLAPSE)
