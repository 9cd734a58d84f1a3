"""Transport: how messages, sums and handshakes get from rank to rank.

A message is the tuple of tensors that one stage makes for another.  It travels on an
edge, an integer that names a logical stream: messages of one (edge, sender, receiver)
arrive in the order sent, and no edge ever waits for another.  Shapes and dtypes are
fixed when an end is bound, so nothing but the tensors' bytes is sent.

    send = end.bind_send(edge, peer, specs)            # the sender, once
    post, wait = end.bind_receive(edge, peer, specs)   # the receiver, once
    end.barrier()                                      # every rank, after its last bind
    send(tensors)                                      # each message
    tensors = wait()                                   # each message; before it post(), if any
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.errors import RunError

_ALIGNMENT_BYTES = (
    64  # of each tensor in a packed message: a cache line, and enough for every dtype
)


class TransportError(RunError):
    """A rank that failed, died or left while others counted on it; `rank` says which."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} {reason}")
        self.rank = rank


class TensorSpec(NamedTuple):
    """The shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Store(Protocol):
    """What is used of a torch.distributed.Store, which is one: a few short texts by key.

    Each transport needs one that nobody else writes to: a fresh PrefixStore.
    """

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


@dataclass(slots=True)
class Waited:
    """Seconds in which a rank could do nothing: until a message came, until one had room."""

    to_receive_s: float = 0.0
    to_send_s: float = 0.0


Send = Callable[[Sequence[Tensor]], None]
Post = Callable[[], None]
Wait = Callable[[], list[Tensor]]


class Transport(Protocol):
    """One rank's end.  It is used by one thread at a time, `abort` by any.

    But while one thread sums or gathers, others may send and receive, each on edges of its own.
    """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def waited(self) -> Waited:
        """Return what all sends and receives of this end have waited so far; it goes on counting.

        Threads and shared memory read the clock only where there is something to wait for.
        """
        ...

    @property
    def is_queued(self) -> bool:
        """Return whether sums and gathers are queued, behind and before what the stream has that
        is current; their calls then return at once.
        """
        ...

    @property
    def held_bytes(self) -> int:
        """Return the bytes of a device that messages hold which are on their way from here."""
        ...

    def bind_send(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> Send:
        """Return the call that sends one message of `edge` to `peer`.

        The call returns once its tensors may be dropped or overwritten (the threads
        transport lends them instead, unless told to copy).  It blocks only while a
        bounded number of earlier messages of this edge is unread: `ahead` or more of them
        have room, if the receiver announces so many before it reads the first.

        Raises:   TransportError: a rank failed; the call: ValueError: tensors unlike `specs`.
        """
        ...

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Post | None, Wait]:
        """Return (post, wait): announce one receive, and return the oldest message not yet taken.

        `post` is None where nothing need be announced.  `wait` returns contiguous
        tensors of the caller's own and posts by itself what was not posted.
        """
        ...

    def bind_memory(self, edge: int, maker: int, reader: int, size_bytes: int) -> Tensor | None:
        """Return bytes, zeros at first, that `maker` writes and `reader` reads; both call it.

        They stay readable when the maker is gone.  What was written before both came to a sum, a
        gather or a barrier can be read after it.  None where the two share no memory.
        Pages that nobody writes to take no memory.
        """
        ...

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Replace `tensor` on all `ranks` by its sum over them, bitwise the same on all.

        Over gloo and NCCL `ranks` are all of them, or a set that every rank was told beforehand.
        """
        ...

    def connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Tell every rank, which all call it, of more sets of ranks that will sum or gather."""
        ...

    def all_gather(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Fill in the parts of all `ranks`; each brings its own: whole[cuts[i] : cuts[i + 1]].

        `whole` is contiguous, with one dimension.
        """
        ...

    def reduce_scatter(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Replace this rank's part of `whole` by its sum over `ranks`, in their order.

        The parts are those of `all_gather`; what the other ones hold afterwards is not said.
        """
        ...

    def all_gather_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        """Return the payload of each of `ranks`, in their order."""
        ...

    def broadcast_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> bytes:
        """Return the payload of `ranks[0]`; what the others bring is ignored."""
        ...

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        """Give each other member of `ranks` one tensor, and take one from each, in their order.

        All are contiguous, of one dtype and one dimension; what is given here is as long as what is
        taken there.  Own places are left alone.
        """
        ...

    def barrier(self) -> None:
        """Return once every rank has called it; the first one opens what was bound."""
        ...

    def abort(self, reason: str) -> None:
        """Let every rank that waits, now or later, raise this rank and reason as TransportError.

        The first abort counts; it returns without waiting.
        """
        ...

    def close(self) -> None:
        """Leave: what was sent may still be received; a rank that waits for more raises."""
        ...


def untouched(size_bytes: int) -> Tensor:
    """Return zeros of which no page takes memory before it is written to."""
    return torch.from_numpy(np.zeros(size_bytes, np.uint8))  # pyright: ignore


def check_message(tensors: Sequence[Tensor], specs: tuple[TensorSpec, ...], edge: int) -> None:
    """Raise ValueError when `tensors` are not what the ends of `edge` agreed on."""
    brought = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    if brought != specs:
        raise ValueError(f"edge {edge} carries ({_listed(specs)}), not ({_listed(brought)})")


def _listed(specs: tuple[TensorSpec, ...]) -> str:
    return ", ".join(map(str, specs))


def check_members(rank: int, num_ranks: int, ranks: tuple[int, ...]) -> None:
    """Raise ValueError when `ranks` cannot be a group that `rank` takes part in."""
    if (
        rank not in ranks
        or len(set(ranks)) != len(ranks)
        or not all(0 <= r < num_ranks for r in ranks)
    ):
        raise ValueError(
            f"rank {rank} of {num_ranks} calls for the ranks {ranks}: not distinct, or without it"
        )


def check_cuts(whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
    """Raise ValueError when `cuts` do not divide `whole` among `ranks`."""
    is_flat = whole.dim() == 1 and whole.is_contiguous()
    ends = [0, *sorted(cuts[1:-1]), whole.numel()]
    if not is_flat or len(cuts) != len(ranks) + 1 or list(cuts) != ends:
        raise ValueError(f"{list(whole.shape)} numbers cut at {cuts} for the ranks {ranks}")


def check_peer(rank: int, num_ranks: int, peer: int, edge: int) -> None:
    """Raise ValueError when `peer` is not another rank."""
    if peer == rank or not 0 <= peer < num_ranks:
        raise ValueError(
            f"edge {edge} of rank {rank} leads to rank {peer}, which is no other one of {num_ranks}"
        )


def packed_bytes(specs: tuple[TensorSpec, ...]) -> int:
    """Return the bytes of a message packed by `unpacked`, the gaps between tensors included."""
    return sum(_padded(spec.size_bytes) for spec in specs)


def unpacked(flat: Tensor, specs: tuple[TensorSpec, ...]) -> list[Tensor]:
    """Return one view for each of `specs` into the bytes `flat`, each at a multiple of 64 bytes."""
    views: list[Tensor] = []
    start = 0
    for spec in specs:
        views.append(flat[start : start + spec.size_bytes].view(spec.dtype).view(spec.shape))
        start += _padded(spec.size_bytes)
    return views


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
