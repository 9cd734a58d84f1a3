"""Record: what a rank gives its guard of one step, as bytes in a place of fixed size.

    head    numbers of eight bytes: see Head
    news    JSON: the key, dtype and shape of each tensor that not every record has
    ...     tensors, each at the beginning of a cache line

The head is written last, and its step says whether the record is there.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from penstock.members.words import HeldTensor

ALIGN_BYTES = 64  # a cache line
HEAD_BYTES = 64


class Head(NamedTuple):
    """The beginning of a record.

    step:     whose gradients it has; `before`: the steps that its state has behind it, or -1.
    size:     bytes of all.
    """

    step: int
    before: int
    is_left_out: bool
    news_bytes: int = 0
    size: int = 0

    @property
    def has_gradients(self) -> bool:
        """Return whether it is that of a step; those that a guard begins with are not."""
        return self.before <= self.step


class RecordLayout(NamedTuple):
    """Where tensors lie in a record, one behind the other.

    rows:  dtype, shape, strides of each, and where it starts, in bytes; `end`: of the last one.
    """

    rows: tuple[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int], ...]
    end: int

    @classmethod
    def of(cls, rows: Sequence[HeldTensor], news_bytes: int) -> "RecordLayout":
        """Return where tensors lie behind so many bytes of news, which come first."""
        found, start = list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]](), HEAD_BYTES
        for row in (HeldTensor("", "uint8", (news_bytes,)), *rows):
            dtype: torch.dtype = getattr(torch, row.dtype)
            strides = torch.empty(row.shape, device="meta").stride()
            found.append((dtype, row.shape, strides, start))
            size = torch.Size(row.shape).numel() * dtype.itemsize
            start += -(-size // ALIGN_BYTES) * ALIGN_BYTES
        return cls(tuple(found), start)


@final
class Slot:
    """A place for a record: `memory`, which another rank may see too."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._words = memory[:HEAD_BYTES].numpy().view("int64")
        self._typed: dict[torch.dtype, Tensor] = {}

    @property
    def head(self) -> Head:
        """Return the head of the record that is there."""
        step, before, is_left_out, news_bytes, size = self._words[:5].tolist()
        return Head(step, before, bool(is_left_out), news_bytes, size)

    @head.setter
    def head(self, head: Head) -> None:
        self._words[:5] = head

    def views(self, layout: RecordLayout) -> list[Tensor]:
        """Return where the news and the tensors of a record are, for which there is room."""
        found = list[Tensor]()
        for dtype, shape, strides, start in layout.rows:
            whole = self._typed.get(dtype)
            if whole is None:
                whole = self._typed[dtype] = self.memory.view(dtype)
            at = whole.storage_offset() + start // dtype.itemsize
            found.append(whole.as_strided(shape, strides, at))
        return found

    def rooms(self) -> Iterator[Tensor]:
        """Yield where a record is put that comes from elsewhere: its head says how long it is."""
        yield self.memory[:HEAD_BYTES]
        yield self.memory[HEAD_BYTES : self.head.size]


def slots_in(memory: Tensor, count: int) -> list[Slot]:
    """Return so many slots of one size."""
    size = len(memory) // count
    return [Slot(memory[at * size : (at + 1) * size]) for at in range(count)]
