"""Snapshot: a copy of a rank's state in memory that it shares with the process that writes it.

The memory has no name in any folder, is made once, and grows where the state does.
"""

import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.checkpoints.part_file import Piece, arranged
from penstock.device import Device, here, of
from penstock.errors import CheckpointError

_NAMES = {  # of safetensors, for torch's types
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}


def described(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Return what a file would say of tensors, in its order.

    Raises:   CheckpointError: one is of a type that it cannot hold.
    """
    return arranged(_piece(key, value) for key, value in tensors.items())


def _piece(key: str, value: Tensor) -> Piece:
    name, width = _NAMES.get(value.dtype), value.element_size()
    if name is None:
        message = f"{key} is a tensor of {value.dtype}, which a checkpoint cannot hold"
        raise CheckpointError(message, hint="keep it as two tensors of a usual type, or as float32")
    return Piece(key, name, tuple(value.shape), width, value.numel() * width)


def bytes_of(value: Tensor) -> memoryview:
    """Return the bytes of a tensor, copied only where they do not lie in order on the CPU."""
    plain = plain_of(value).to("cpu").contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]


def plain_of(value: Tensor) -> Tensor:
    """Return a tensor as numbers in memory: dense, and not to be read as conjugate or negative."""
    dense = value.detach()
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return dense.resolve_conj().resolve_neg()


_tensor: Any = torch.from_numpy  # pyright: ignore


class Snapshot:
    """Memory for a copy; `file` is what another process maps it by."""

    def __init__(self) -> None:
        self.file = os.memfd_create("penstock snapshot")
        self.size_bytes = 0
        self._memory: Any = None
        self._let_go: Callable[[], None] | None = None  # where a device copies into it

    def grow(self, size_bytes: int) -> None:
        """Have at least so many bytes; the memory itself comes when it is first written to."""
        size_bytes = max(1, size_bytes)
        if size_bytes > self.size_bytes:
            os.ftruncate(self.file, size_bytes)
            self._unpin()
            self._memory = np.frombuffer(mmap.mmap(self.file, size_bytes), np.uint8)
            self.size_bytes = size_bytes
            if (device := here()).is_queued:
                self._let_go = device.pin(_tensor(self._memory))

    def take(self, tensors: Mapping[str, Tensor], pieces: Sequence[Piece]) -> None:
        """Copy `tensors`, in the order of `pieces`; there has to be room.

        Copies of a device's tensors are queued together, and waited for once.
        """
        place, device = 0, Device("cpu")
        for piece in pieces:
            target = self._memory[place : place + piece.size_bytes]
            value = plain_of(tensors[piece.key])
            if of(value.device).is_cpu and value.is_contiguous():
                own: Any = value.reshape(-1).view(torch.uint8).numpy()
                np.copyto(target, own)
            elif piece.size_bytes:
                view = _tensor(target).view(value.dtype).view(value.shape)
                view.copy_(value, non_blocking=True)
                device = of(value.device)
            place += piece.size_bytes
        if device.is_queued:
            device.current_stream().synchronize()

    def _unpin(self) -> None:
        if self._let_go is not None:
            self._let_go()
            self._let_go = None

    def close(self) -> None:
        """Let go of the memory."""
        self._unpin()
        self._memory = None
        os.close(self.file)
