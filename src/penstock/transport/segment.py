"""Segment: memory that processes of one host share, and waiting for its words to change.

A segment is an anonymous file (memfd): it has no name, so nothing is left of it
however its users die, and no limit of /dev/shm applies.  Another process of the same
user opens it as /proc/<pid>/fd/<fd> while its maker lives.

Words are aligned 32-bit integers with one writer each.  On x86-64 they are written whole
and in program order, which is what publishing a message needs.  A load may still overtake
an earlier store, so who publishes takes a lock, which is a fence, before it looks whether
anybody sleeps.
"""

from __future__ import annotations

import ctypes
import os
import platform
import secrets
import sys
from functools import cache
from typing import final

import torch
from torch import Tensor

LINE_WORDS = 16  # words of one cache line: what different ranks write stands on different lines
WORD_MASK = 0xFFFFFFFF
FIRST_COUNT = WORD_MASK - 7  # counts wrap after 2**32; starting here, every run tries it
_TOKEN_BYTES = 16
_SYS_FUTEX = 202  # x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> tuple[bool, str]:
    """Return (True, "") where segments work, else (False, the reason)."""
    if sys.platform != "linux":
        return False, f"{sys.platform} has no futex"
    if platform.machine() != "x86_64":
        return False, f"the order of stores is known on x86_64 only, not on {platform.machine()}"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return False, "this Python has no memfd_create or pidfd_open"
    try:
        os.close(os.pidfd_open(os.getpid()))
        segment = SharedSegment.make(LINE_WORDS)
        opened = SharedSegment.open(segment.address, LINE_WORDS)
        wake(opened.address_of(0))
    except OSError as error:
        return False, f"memory cannot be shared between processes here: {error}"
    segment.close()
    return True, ""


def host_key() -> str:
    """Return a text that two processes have in common exactly if they can share segments."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


@final
class SharedSegment:
    """`num_words` shared words, which are zero at first, seen as words and as bytes.

    Line 0 holds a token that tells an opener that it has opened the right thing.
    """

    def __init__(self, fd: int, num_words: int, *, is_maker: bool) -> None:
        # Python's mmap would keep a file of its own open; torch's does not
        path, size_bytes = f"/proc/self/fd/{fd}", num_words * 4
        self.bytes: Tensor = torch.from_file(path, True, size_bytes, dtype=torch.uint8)
        self.memory = memoryview(self.bytes.numpy())  # pyright: ignore[reportArgumentType]
        self.words = self.memory.cast("I")
        self._fd = fd if is_maker else -1
        self._token = bytes(self.memory[:_TOKEN_BYTES])

    @staticmethod
    def make(num_words: int) -> SharedSegment:
        """Return a new segment; it stays open to others until `close`.

        Raises:   OSError: no memory, or no more files may be opened.
        """
        fd = os.memfd_create("penstock")
        os.ftruncate(fd, num_words * 4)
        os.pwrite(fd, secrets.token_bytes(_TOKEN_BYTES), 0)
        return SharedSegment(fd, num_words, is_maker=True)

    @staticmethod
    def open(address: str, num_words: int) -> SharedSegment:
        """Return the segment of another process.

        Raises:   OSError: its maker has closed it or is gone, or it is not the segment meant.
        """
        pid, number, token = address.split()
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes != num_words * 4 or os.pread(fd, _TOKEN_BYTES, 0).hex() != token:
                raise OSError(f"process {pid} does not hold the segment of {num_words * 4} bytes")
            return SharedSegment(fd, num_words, is_maker=False)
        finally:
            os.close(fd)

    @property
    def address(self) -> str:
        return f"{os.getpid()} {self._fd} {self._token.hex()}"

    def address_of(self, word: int) -> int:
        """Return where a word stands in this process, for `sleep_while` and `wake`."""
        return self.bytes.data_ptr() + 4 * word

    def close(self) -> None:
        """Let no one else open it; the memory goes with the last view of it in any process."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def sleep_while(address: int, value: int, limit_s: float) -> None:
    """Sleep until woken, for `limit_s` at most, and not at all if the word is not `value`."""
    limit = _Timespec(int(limit_s), int(limit_s % 1 * 1e9))
    _syscall()(_SYS_FUTEX, address, _FUTEX_WAIT, value, ctypes.addressof(limit), 0, 0)


def wake(address: int) -> None:
    """Wake all who sleep on a word."""
    _syscall()(_SYS_FUTEX, address, _FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


@cache
def _syscall() -> ctypes._NamedFuncPointer:  # pyright: ignore[reportPrivateUsage]
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    )
    call.restype = ctypes.c_long
    return call
