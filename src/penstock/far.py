"""Far memory: where tensors wait that are not needed for a while.

For tensors of a CPU a file on disk, in the folder for temporary files (TMPDIR); it has no name once
opened, so nothing is left of it whatever happens.  For those of a GPU pinned memory of the host,
one piece for each room and no larger.

What is moved is written to the file and read from it by calls, for many blocks at once.  A mapping,
at which whoever reads a block in place looks, would be filled by a page fault for every 4 KiB, and
again each time that the system has written the page to disk, as it does after 30 s.  MB/s of copies
of 190 MB to the file on an AMD EPYC, for 75 s, in the mean and at worst, and right after fsync:

    through a mapping   6,800    2,200    1,150
    by calls            7,000    5,500    5,800

Where the system's memory has no room for the file, as in a container that may have little of it,
all of that is as slow as the disk.

Ignores:  that a folder in memory (tmpfs) is no far memory.
"""

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from penstock.device import of

_ALIGN_BYTES = 64  # a cache line; every block starts on one
_MOST_BUFFERS = 1024  # of one call (IOV_MAX of Linux)
_GAP = memoryview(bytearray(_ALIGN_BYTES))  # what lies between two blocks: nobody looks at it

_Call = Callable[[int, Sequence[Any], int], int]


@final
class FarMemory:
    """Far memory of one device: rooms are added to it, and all are gone with the last of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.size_bytes, self.handle = device, 0, -1
        self.is_cpu = of(device).is_cpu
        if self.is_cpu:
            self.handle, path = tempfile.mkstemp(prefix="penstock-", suffix=".far")
            weakref.finalize(self, os.close, self.handle)
            os.unlink(path)

    def evict(self) -> None:
        """Return once all that was put here is on the disk, and the system's memory holds none.

        As where there is no room for it; on a GPU nothing is done.
        """
        if self.handle >= 0:
            os.fdatasync(self.handle)
            os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def room(self, sizes: Sequence[int]) -> "FarRoom":
        """Return room for blocks of so many bytes.

        Raises:   OSError: the folder for temporary files cannot be written.
        """
        starts = list(accumulate((_aligned(size, _ALIGN_BYTES) for size in sizes), initial=0))
        at = self.size_bytes
        if starts[-1]:
            self.size_bytes = _aligned(at + starts[-1], mmap.ALLOCATIONGRANULARITY)
        if self.is_cpu and starts[-1]:
            os.ftruncate(self.handle, self.size_bytes)  # a full disk is told by what is put there
        return FarRoom(self, at, starts, sizes)


@final
class FarRoom:
    """Blocks of far memory, by number."""

    def __init__(
        self, memory: FarMemory, at: int, starts: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self.memory, self.at, self.starts, self.sizes = memory, at, starts, tuple(sizes)

    @cached_property
    def blocks(self) -> list[Tensor]:
        """Return the blocks as tensors, uint8 [size], that lie there; write what was put only."""
        total = self.starts[-1]
        if not self.memory.is_cpu:
            whole = of(self.memory.device).pinned(total)
        elif total:
            whole = torch.frombuffer(
                mmap.mmap(self.memory.handle, total, offset=self.at), dtype=torch.uint8
            )
        else:
            whole = torch.empty(0, dtype=torch.uint8)
        pairs = zip(self.starts, self.sizes, strict=False)
        return [whole[start : start + size] for start, size in pairs]

    def put(self, nears: Mapping[int, Tensor]) -> None:
        """Copy tensors, uint8 [size] each, into blocks.

        On a GPU this is queued.
        Raises:   OSError: the system cannot write, as to a disk that is full.
        """
        if not self.memory.is_cpu:
            for number, near in nears.items():
                self.blocks[number].copy_(near, non_blocking=True)
            return
        self._move(os.pwritev, nears)

    def take(self, nears: Mapping[int, Tensor]) -> None:
        """Copy blocks into tensors, likewise."""
        if not self.memory.is_cpu:
            for number, near in nears.items():
                near.copy_(self.blocks[number], non_blocking=True)
            return
        self._move(os.preadv, nears)

    def _move(self, call: _Call, nears: Mapping[int, Tensor]) -> None:
        """Move blocks, neighbours by one call."""
        run: list[memoryview] = []
        start = end = 0  # of the run, in the room
        for number in sorted(nears):
            near, first = nears[number], self.starts[number]
            if len(near) != self.sizes[number]:
                raise ValueError(f"{len(near)} bytes for a block of {self.sizes[number]}")
            gap = first - end
            if run and 0 <= gap < _ALIGN_BYTES:
                run.append(_GAP[:gap])
            else:
                self._call(call, run, start)
                run, start = [], first
            run.append(_memory_of(near))
            end = first + len(near)
        self._call(call, run, start)

    def _call(self, call: _Call, run: Sequence[memoryview], start: int) -> None:
        """Move neighbours that start at `start` of the room."""
        left, place = [each for each in run if len(each)], self.at + start
        while left:
            done = call(self.memory.handle, left[:_MOST_BUFFERS], place)
            if not done:
                raise OSError(errno.EIO, "far memory ends before what was put there")
            place += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if done:
                left[0] = left[0][done:]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return all memory in which a tensor lies, as bytes."""
    storage = tensor.untyped_storage()
    empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),))


def _memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor; `tensor.numpy()` would fix the size of its storage."""
    place = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(place).cast("B")


def _aligned(size: int, step: int) -> int:
    return -(-size // step) * step
