"""As made: an object as it was when it was handed over, to be had again, any number of times.

What it is made of is copied, but for classes, functions, modules and what is named as shared, which
are those of the author.
"""

import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, final

import torch
from torch import Tensor

_SHARED = type, FunctionType, BuiltinFunctionType, ModuleType


@final
class AsMade:
    """An object as it was when this was made.

    shared:   objects in it that are not copied.
    Raises:   what copying it raises: of a generator, a file, a lock.
    """

    def __init__(self, of: object, *shared: object) -> None:
        self.of = of
        self._shared = dict[int, object]({id(each): each for each in shared})
        self._bytes = self._written()

    def again(self) -> Any:
        """Return the object as it was."""
        reader = _CopyReader(io.BytesIO(self._bytes))
        reader.shared = self._shared
        return reader.load()

    def has_changed(self) -> bool:
        """Return whether the object itself is no longer as it was."""
        return self._written() != self._bytes

    def _written(self) -> bytes:
        file = io.BytesIO()
        writer = _CopyWriter(file)
        writer.shared = self._shared
        writer.dump(self.of)
        return file.getvalue()


class _CopyWriter(pickle.Pickler):
    shared: dict[int, object]

    def persistent_id(self, obj: object, /) -> int | None:
        if isinstance(obj, _SHARED):
            self.shared.setdefault(id(obj), obj)
        return id(obj) if id(obj) in self.shared else None

    def reducer_override(self, obj: object, /) -> Any:
        """Write a tensor as what is in it: what torch writes differs from one time to the next."""
        if not isinstance(obj, Tensor) or obj.layout != torch.strided:
            return NotImplemented
        flat = obj.detach().cpu().reshape(-1).view(torch.uint8)
        return _tensor, (flat.numpy().tobytes(), obj.dtype, tuple(obj.shape))


class _CopyReader(pickle.Unpickler):
    shared: dict[int, object]

    def persistent_load(self, pid: int, /) -> object:
        return self.shared[pid]


def _tensor(content: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
