"""Shared memory: ranks that are processes of one host, whoever started them.

Each (edge, sender, receiver) has a ring of slots.  The sender copies a message into the
next slot and counts it in HEAD; the receiver copies it out and counts it in TAIL.  Who
finds nothing to do looks again for a while, then sleeps on the other's count, and is
woken because it says so:

    token | HEAD | TAIL | RECEIVER_SLEEPS | SENDER_SLEEPS | slot 0 | slot 1 | ...

Sleepers look around every 20 ms, so an abort or a dead process ends every wait, and
nothing outlives the processes (see roster.py, segment.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from penstock.transport.meeting import Meeting
from penstock.transport.roster import Roster
from penstock.transport.segment import (
    FIRST_COUNT,
    LINE_WORDS,
    WORD_MASK,
    SharedSegment,
    available,
    host_key,
    wake,
)
from penstock.transport.transport import (
    Post,
    Send,
    Store,
    TensorSpec,
    Wait,
    Waited,
    check_cuts,
    check_members,
    check_message,
    check_peer,
    packed_bytes,
    unpacked,
)

__all__ = ["SharedMemoryTransport", "available", "host_key"]

_HEAD, _TAIL, _RECEIVER_SLEEPS, _SENDER_SLEEPS, _SLOTS = (LINE_WORDS * line for line in range(1, 6))
_SPIN_S = 50e-6


@final
class SharedMemoryTransport:
    """One rank's end.  All ranks of the job build theirs at the same time, or those that are `here`
    of several hosts' ranks; an end knows no others.

    `store` is a torch.distributed.Store, or a prefix of one, that this job alone uses;
    it carries addresses only.  A ring has `slots` slots, or more where a program announces
    more receives ahead: that many messages of an edge may be unread before `send` blocks.
    A waiting rank spins for `spin_s` seconds before it
    sleeps: None means 50 us if each rank can have a core, else 0.

    While ranks wait for each other to join, `news` is asked, and may raise.

    Memory: slots * message bytes for each edge, as far as slots were ever used; a tensor
    that is received is the caller's own.  Tensors lie in host memory.
    Raises:   TransportError: a rank does not come, or not within `limit_s` seconds.
    """

    def __init__(  # noqa: PLR0913 - what waiting may depend on
        self,
        rank: int,
        num_ranks: int,
        store: Store,
        *,
        here: Sequence[int] = (),
        slots: int = 4,
        spin_s: float | None = None,
        limit_s: float = 300.0,
        news: Callable[[], None] = lambda: None,
    ) -> None:
        if not 0 <= rank < num_ranks or slots < 1:
            raise ValueError(f"rank {rank} of {num_ranks}, {slots} slots: no such rank, or no slot")
        here = here or range(num_ranks)
        if spin_s is None:
            spin_s = _SPIN_S if len(os.sched_getaffinity(0)) >= len(here) else 0.0
        self._rank = rank
        self._slots = slots
        self._waited = Waited()
        waits = {"spin_s": spin_s, "limit_s": limit_s}
        self._roster = Roster(rank, (num_ranks, here), store, **waits, news=news)
        self._meetings: dict[tuple[int, ...], Meeting] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._roster.num_ranks

    @property
    def waited(self) -> Waited:
        return self._waited

    @property
    def is_queued(self) -> bool:
        return False

    @property
    def held_bytes(self) -> int:
        return 0

    def bind_send(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> Send:
        check_peer(self._rank, self.num_ranks, peer, edge)
        ring = self._ring((edge, self._rank, peer), specs, ahead)
        return _sender(self._roster, ring, self._waited)

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Post | None, Wait]:
        check_peer(self._rank, self.num_ranks, peer, edge)
        ring = self._ring((edge, peer, self._rank), specs, ahead)
        return None, _receiver(self._roster, ring, self._waited)

    def _ring(self, way: tuple[int, int, int], specs: tuple[TensorSpec, ...], ahead: int) -> _Ring:
        edge, sender, receiver = way
        size_bytes, num_slots = packed_bytes(specs), max(self._slots, ahead)
        segment = self._roster.share(
            f"edge {edge} from {sender} to {receiver}",
            _SLOTS + num_slots * size_bytes // 4,
            maker=min(sender, receiver),
            agreed=f"{num_slots} slots of ({', '.join(map(str, specs))})",
            prepare=_start_counts,
        )
        starts = [4 * _SLOTS + slot * size_bytes for slot in range(num_slots)]
        slots = [unpacked(segment.bytes[at : at + size_bytes], specs) for at in starts]
        return _Ring(edge, sender, receiver, specs, segment, slots)

    def bind_memory(self, edge: int, maker: int, reader: int, size_bytes: int) -> Tensor:
        num_words = LINE_WORDS - (-size_bytes // 4)
        key, agreed = f"memory {edge} from {maker} to {reader}", f"{size_bytes} bytes"
        segment = self._roster.share(key, num_words, maker=maker, agreed=agreed)
        return segment.bytes[4 * LINE_WORDS : 4 * LINE_WORDS + size_bytes]

    def connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Do nothing: ranks that sum find each other."""

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum in the order of `ranks`."""
        self._meeting(ranks).all_reduce(tensor)

    def all_gather(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        check_cuts(whole, cuts, ranks)
        self._meeting(ranks).gather_parts(whole, cuts)

    def reduce_scatter(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        check_cuts(whole, cuts, ranks)
        self._meeting(ranks).scatter_sums(whole, cuts)

    def all_gather_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        return self._meeting(ranks).all_gather(payload)

    def broadcast_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> bytes:
        return self.all_gather_bytes(payload if self._rank == ranks[0] else b"", ranks)[0]

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        self._meeting(ranks).swap(gives, takes)

    def barrier(self) -> None:
        self._meeting(tuple(range(self.num_ranks))).meet()

    def _meeting(self, ranks: tuple[int, ...]) -> Meeting:
        meeting = self._meetings.get(ranks)
        if meeting is None:
            check_members(self._rank, self.num_ranks, ranks)
            meeting = self._meetings[ranks] = Meeting(self._roster, ranks)
        return meeting

    def abort(self, reason: str) -> None:
        self._roster.fail(self._rank, f"failed: {reason}")

    def close(self) -> None:
        self._roster.leave()


class _Ring(NamedTuple):
    edge: int
    sender: int
    receiver: int
    specs: tuple[TensorSpec, ...]
    segment: SharedSegment
    slots: list[list[Tensor]]


def _start_counts(segment: SharedSegment) -> None:
    segment.words[_HEAD] = segment.words[_TAIL] = FIRST_COUNT


def _sender(roster: Roster, ring: _Ring, waited: Waited) -> Send:
    edge, segment, slots, specs, peer = (
        ring.edge,
        ring.segment,
        ring.slots,
        ring.specs,
        ring.receiver,
    )
    expected = [(torch.Size(spec.shape), spec.dtype) for spec in specs]
    what = f"rank {roster.rank} waits for it to read edge {edge}"
    words, news, failed = segment.words, roster.words, roster.failed_word
    head_address, num_slots, sent, slot = segment.address_of(_HEAD), len(slots), FIRST_COUNT, 0
    fence = threading.Lock()
    acquire, release, clock = fence.acquire, fence.release, time.perf_counter

    def send(tensors: Sequence[Tensor]) -> None:
        nonlocal sent, slot
        if news[failed]:
            roster.look()
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != expected:
            check_message(tensors, specs, edge)
        full = (sent - num_slots) & WORD_MASK
        if words[_TAIL] == full:
            start = clock()
            roster.wait_while(segment, _TAIL, full, sleeps=_SENDER_SLEEPS, peer=peer, what=what)
            waited.to_send_s += clock() - start
        for view, tensor in zip(slots[slot], tensors):  # noqa: B905 (checked above)
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)
        slot = slot + 1 if slot + 1 < num_slots else 0
        sent = (sent + 1) & WORD_MASK
        words[_HEAD] = sent
        acquire()  # a fence, see segment.py
        release()
        if words[_RECEIVER_SLEEPS]:
            wake(head_address)

    return send


def _receiver(roster: Roster, ring: _Ring, waited: Waited) -> Wait:
    segment, slots, peer = ring.segment, ring.slots, ring.sender
    what = f"rank {roster.rank} waits for it on edge {ring.edge}"
    words, news, failed = segment.words, roster.words, roster.failed_word
    tail_address, num_slots, received, slot = segment.address_of(_TAIL), len(slots), FIRST_COUNT, 0
    fence = threading.Lock()
    acquire, release, clock = fence.acquire, fence.release, time.perf_counter

    def wait() -> list[Tensor]:
        nonlocal received, slot
        if news[failed]:
            roster.look()
        if words[_HEAD] == received:
            start = clock()
            roster.wait_while(
                segment, _HEAD, received, sleeps=_RECEIVER_SLEEPS, peer=peer, what=what
            )
            waited.to_receive_s += clock() - start
        tensors = [view.clone() for view in slots[slot]]
        slot = slot + 1 if slot + 1 < num_slots else 0
        received = (received + 1) & WORD_MASK
        words[_TAIL] = received
        acquire()
        release()
        if words[_SENDER_SLEEPS]:
            wake(tail_address)
        return tensors

    return wait
