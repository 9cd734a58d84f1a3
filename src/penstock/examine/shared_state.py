"""Shared state: memory that processes share, by which a look at a job is no look apart.

A counter in Python that a look moves is where it was when the run begins: it was moved in another
process.  One in `multiprocessing.Value`, in an `Array` or in `SharedMemory` is not.

Not noticed:  files mapped into memory; tensors in shared memory; what changes only later.
"""

import gc
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any


def shared_digests() -> dict[str, str]:
    """Return digests of all memory that this process shares by `multiprocessing`, by a name."""
    return {name: hashlib.blake2b(seen).hexdigest() for name, seen in _shared()}


def _shared() -> Iterator[tuple[str, Any]]:
    heap: Any = sys.modules.get("multiprocessing.heap")
    if heap is not None:
        for arena in heap.BufferWrapper._heap._arenas:  # which tells of them in no other way
            yield f"multiprocessing.Value, or an Array, {id(arena)}", arena.buffer
    module: Any = sys.modules.get("multiprocessing.shared_memory")
    if module is not None:
        for each in [o for o in gc.get_objects() if type(o) is module.SharedMemory]:
            if each.buf is not None:  # else it is closed
                yield f"SharedMemory {each.name}", each.buf


def what_moved(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return what kind of memory is another one than before; "": none is."""
    moved = [name for name, digest in before.items() if after.get(name, digest) != digest]
    return moved[0].rpartition(" ")[0].rstrip(",") if moved else ""
