"""Shut port: what listens for the ranks of a group hears nobody any more once all have connected.

gloo asks whoever connects for no proof, keeps each connection that says half a greeting, and goes
on listening for as long as the group lives.  A thousand strangers took its descriptors.  Nobody may
close its socket, which its thread polls; but a filter in the kernel that takes no packet lets no
new connection begin.  Those that are there have none.

Ignores:  strangers who come before all have connected; systems other than Linux.
"""

import contextlib
import ctypes
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

T = TypeVar("T")
_Key: TypeAlias = tuple[int, int]  # what tells a file from all others

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_TAKE_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET: of so many bytes
_OPEN_FILES = Path("/proc/self/fd")


def shut_when_made(call: Callable[[], T]) -> T:
    """Return what `call` returns; what it has begun to listen at takes no new connection then."""
    before = {key for _, key in _listening()}
    made = call()
    for file, key in _listening():
        if key not in before:
            _shut(file, key)
    return made


def _listening() -> Iterator[tuple[int, _Key]]:
    """Yield the files of this process that are sockets at which it listens, and their keys.

    Other threads may close them meanwhile.
    """
    try:
        names = os.listdir(_OPEN_FILES)
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            key = _key(int(name))
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode) and _is_listening(int(name)):
                yield int(name), key


def _is_listening(file: int) -> bool:
    end = socket.socket(fileno=os.dup(file))
    with end:
        is_tcp = end.family in (socket.AF_INET, socket.AF_INET6)
        return is_tcp and bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _key(file: int) -> _Key:
    about = os.fstat(file)
    return about.st_dev, about.st_ino


def _shut(file: int, key: _Key) -> None:
    """Let a socket take no new connection, unless the file is another one by now."""
    program = ctypes.create_string_buffer(_TAKE_NOTHING)
    words = struct.pack("HL", 1, ctypes.addressof(program))
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as end:
        if _key(end.fileno()) == key:
            end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, words)
