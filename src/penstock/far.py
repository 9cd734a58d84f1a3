"""Far memory: where tensors wait that are not needed for a while.

For tensors of a CPU a file on disk, mapped into memory, in the folder for temporary files (TMPDIR);
it has no name once mapped, so nothing is left of it whatever happens.  For those of
a GPU pinned memory of the host.

Ignores:  that a folder in memory (tmpfs) is no far memory; that the system keeps a file's pages in
          memory while there is room.
"""

import os
import tempfile
from typing import Any

import torch
from torch import Tensor


def far_memory(size_bytes: int, device: torch.device) -> Tensor:
    """Return room for `size_bytes`, in far memory of `device`: uint8 [size_bytes].

    Raises:   OSError: the folder for temporary files cannot be written, or is full.
    """
    if device.type != "cpu":
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    handle, path = tempfile.mkstemp(prefix="penstock-", suffix=".far")
    try:
        if size_bytes:
            os.posix_fallocate(
                handle, 0, size_bytes
            )  # a full disk is told here, and not by a signal
        return torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)
    finally:
        os.close(handle)
        os.unlink(path)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return all memory in which a tensor lies, as bytes."""
    storage = tensor.untyped_storage()
    empty: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),))
