"""Threads: many ranks in one process; a message is handed over, not copied."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import final

import torch
from torch import Tensor

from penstock.transport.transport import (
    Post,
    Send,
    TensorSpec,
    TransportError,
    Wait,
    Waited,
    check_cuts,
    check_members,
    check_message,
    check_peer,
    untouched,
)

_READ_S = 10.0  # for which a member may look at what others brought, when one has failed


def thread_transports(
    num_ranks: int, *, capacity: int | None = None, copies: bool = False
) -> tuple[ThreadTransport, ...]:
    """Return the ends of `num_ranks` ranks that live in this process, one thread each.

    `capacity` is the number of unread messages of an edge at which `send` blocks; None
    means never.  Without `copies` sender and receiver share a message's storage: neither
    may write into it.  With it they behave as in the other transports.
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity is {capacity} messages; it must be 1 or more, or None")
    job = _Shared(num_ranks, capacity)
    return tuple(ThreadTransport(job, rank, copies=copies) for rank in range(num_ranks))


@final
class ThreadTransport:
    """One rank's end; see `thread_transports`."""

    def __init__(self, job: _Shared, rank: int, *, copies: bool) -> None:
        self._job = job
        self._rank = rank
        self._copies = copies
        self._waited = Waited()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def waited(self) -> Waited:
        return self._waited

    @property
    def num_ranks(self) -> int:
        return self._job.num_ranks

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
        job, copies, waited = self._job, self._copies, self._waited
        stream = job.stream(edge, self._rank, peer, specs)
        put, room = stream.messages.put, stream.room
        expected = [(torch.Size(spec.shape), spec.dtype) for spec in specs]

        def send(tensors: Sequence[Tensor]) -> None:
            if [(tensor.shape, tensor.dtype) for tensor in tensors] != expected:
                check_message(tensors, specs, edge)
            if job.failure is None and room is not None and _room_of(room, waited) is None:
                room.put(None)
                job.check()
                raise TransportError(
                    peer, f"has left; rank {self._rank} sends to it on edge {edge}"
                )
            job.check()
            if copies:
                put(
                    [
                        tensor.detach().clone(memory_format=torch.contiguous_format)
                        for tensor in tensors
                    ]
                )
            else:
                put([tensor.detach().contiguous() for tensor in tensors])

        return send

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Post | None, Wait]:
        check_peer(self._rank, self.num_ranks, peer, edge)
        job, waited, clock = self._job, self._waited, time.perf_counter
        stream = job.stream(edge, peer, self._rank, specs)
        messages, get, room = stream.messages, stream.messages.get, stream.room

        def wait() -> list[Tensor]:
            job.check()
            try:
                message = get(False)
            except Empty:
                start = clock()
                message = get()
                waited.to_receive_s += clock() - start
            if message is None:
                messages.put(None)
                job.check()
                raise TransportError(
                    peer, f"has left; rank {self._rank} waits for it on edge {edge}"
                )
            if room is not None:
                room.put(True)
            return message

        return None, wait

    def bind_memory(self, edge: int, maker: int, reader: int, size_bytes: int) -> Tensor:
        return self._job.memory((edge, maker, reader), size_bytes)

    def connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Do nothing: ranks that sum find each other."""

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum in the order of `ranks`; each member adds one part, for all."""
        check_members(self._rank, self.num_ranks, ranks)
        meeting, at = self._job.meeting(ranks), ranks.index(self._rank)
        own = tensor.detach().contiguous().view(-1)
        meeting.tensors[at] = own
        meeting.meet(at, reads=True)
        tensors = list(meeting.tensors)
        for rank, other in zip(ranks, tensors, strict=True):
            if other.numel() != tensors[0].numel() or other.dtype != tensors[0].dtype:
                specs = [TensorSpec((t.numel(),), t.dtype) for t in (other, tensors[0])]
                raise TransportError(rank, f"sums {specs[0]}, rank {ranks[0]} sums {specs[1]}")
        part = slice(own.numel() * at // len(ranks), own.numel() * (at + 1) // len(ranks))
        total = tensors[0][part].clone()
        for other in tensors[1:]:
            total += other[part]
        for other in tensors:
            other[part] = total
        meeting.meet(at)
        meeting.tensors[at] = torch.empty(0)  # holds nothing longer than needed
        if not tensor.is_contiguous():
            tensor.detach().copy_(own.view(tensor.shape))

    def all_gather(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        tensors, at = self._brought(whole, cuts, ranks), ranks.index(self._rank)
        for place, other in enumerate(tensors):
            if place != at:
                part = slice(cuts[place], cuts[place + 1])
                whole[part].copy_(other[part])
        self._part(ranks)

    def reduce_scatter(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        tensors, at = self._brought(whole, cuts, ranks), ranks.index(self._rank)
        mine = slice(cuts[at], cuts[at + 1])
        total = tensors[0][mine].clone()
        for other in tensors[1:]:
            total += other[mine]
        whole[mine].copy_(total)
        self._part(ranks)

    def _brought(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> list[Tensor]:
        """Return what every member brings, once all have."""
        check_members(self._rank, self.num_ranks, ranks)
        check_cuts(whole, cuts, ranks)
        meeting, at = self._job.meeting(ranks), ranks.index(self._rank)
        meeting.tensors[at] = whole.detach()
        meeting.meet(at, reads=True)
        tensors = list(meeting.tensors)
        for rank, other in zip(ranks, tensors, strict=True):
            if (other.shape, other.dtype) != (tensors[0].shape, tensors[0].dtype):
                specs = [TensorSpec(tuple(t.shape), t.dtype) for t in (other, tensors[0])]
                raise TransportError(rank, f"shares {specs[0]}, rank {ranks[0]} shares {specs[1]}")
        return tensors

    def _part(self, ranks: tuple[int, ...]) -> None:
        """Return once nobody reads what was brought any more."""
        meeting, at = self._job.meeting(ranks), ranks.index(self._rank)
        meeting.meet(at)
        meeting.tensors[at] = torch.empty(0)

    def all_gather_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        check_members(self._rank, self.num_ranks, ranks)
        meeting, at = self._job.meeting(ranks), ranks.index(self._rank)
        meeting.payloads[at] = payload
        meeting.meet(at)
        payloads = list(meeting.payloads)
        meeting.meet(at)
        return payloads

    def broadcast_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> bytes:
        return self.all_gather_bytes(payload, ranks)[0]

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        check_members(self._rank, self.num_ranks, ranks)
        meeting, at = self._job.meeting(ranks), ranks.index(self._rank)
        meeting.given[at] = gives
        meeting.meet(at, reads=True)
        for place, given in enumerate(list(meeting.given)):
            if place != at:
                takes[place].copy_(given[at])
        meeting.meet(at)
        meeting.given[at] = ()

    def barrier(self) -> None:
        self._job.meeting(tuple(range(self.num_ranks))).meet(self._rank)

    def abort(self, reason: str) -> None:
        self._job.abort(self._rank, reason)

    def close(self) -> None:
        self._job.leave(self._rank)


def _room_of(room: SimpleQueue[bool | None], waited: Waited) -> bool | None:
    """Return what `room` gives as soon as there is something."""
    try:
        return room.get(False)
    except Empty:
        start = time.perf_counter()
        found = room.get()
        waited.to_send_s += time.perf_counter() - start
        return found


@final
class _Shared:
    """What the ranks of one process share."""

    def __init__(self, num_ranks: int, capacity: int | None) -> None:
        self.num_ranks = num_ranks
        self.capacity = capacity
        self.failure: tuple[int, str] | None = None
        self.left: set[int] = set()
        self._lock = threading.Lock()
        self._memory: dict[tuple[int, int, int], Tensor] = {}
        self._streams: dict[tuple[int, int, int], _EdgeQueue] = {}
        self._meetings: dict[tuple[int, ...], _ThreadMeeting] = {}

    def check(self) -> None:
        if self.failure is not None:
            rank, reason = self.failure
            raise TransportError(rank, f"failed: {reason}")

    def stream(
        self, edge: int, sender: int, receiver: int, specs: tuple[TensorSpec, ...]
    ) -> _EdgeQueue:
        with self._lock:
            stream = self._streams.setdefault(
                (edge, sender, receiver), _EdgeQueue(specs, self.capacity)
            )
            if stream.specs != specs:
                raise TransportError(
                    sender, f"and rank {receiver} bind edge {edge} with different shapes or dtypes"
                )
            if self.failure is not None or not self.left.isdisjoint((sender, receiver)):
                stream.wake()
            return stream

    def memory(self, way: tuple[int, int, int], size_bytes: int) -> Tensor:
        with self._lock:
            found = self._memory.setdefault(way, untouched(size_bytes))
        if found.nbytes != size_bytes:
            edge, maker, reader = way
            what = f"and rank {reader} bind memory {edge} of {found.nbytes} and {size_bytes} bytes"
            raise TransportError(maker, what)
        return found

    def meeting(self, ranks: tuple[int, ...]) -> _ThreadMeeting:
        with self._lock:
            return self._meetings.setdefault(ranks, _ThreadMeeting(self, ranks))

    def abort(self, rank: int, reason: str) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = rank, reason
            self._wake(set(range(self.num_ranks)))

    def leave(self, rank: int) -> None:
        with self._lock:
            self.left.add(rank)
            self._wake({rank})

    def _wake(self, ranks: set[int]) -> None:
        for (_, sender, receiver), stream in self._streams.items():
            if not ranks.isdisjoint((sender, receiver)):
                stream.wake()
        for meeting in self._meetings.values():
            meeting.wake()


@final
class _EdgeQueue:
    """The messages of one edge between two ranks; None in a queue means: find out why."""

    def __init__(self, specs: tuple[TensorSpec, ...], capacity: int | None) -> None:
        self.specs = specs
        self.messages: SimpleQueue[list[Tensor] | None] = SimpleQueue()
        self.room: SimpleQueue[bool | None] | None = None if capacity is None else SimpleQueue()
        if self.room is not None and capacity is not None:
            for _ in range(capacity):
                self.room.put(True)

    def wake(self) -> None:
        self.messages.put(None)
        if self.room is not None:
            self.room.put(None)


@final
class _ThreadMeeting:
    """A place where `ranks` wait for each other, and what each of them has brought."""

    def __init__(self, job: _Shared, ranks: tuple[int, ...]) -> None:
        self._job = job
        self._ranks = ranks
        self._arrivals = [0] * len(ranks)
        self._changed = threading.Condition()
        self._reading = set[int]()  # members that look at what others brought
        self.tensors = [torch.empty(0) for _ in ranks]
        self.payloads = [b"" for _ in ranks]
        self.given: list[Sequence[Tensor]] = [() for _ in ranks]

    def meet(self, at: int, *, reads: bool = False) -> None:
        """Return once every member has arrived as often as the member at `at`.

        reads:  what others brought, until it comes again.  Who raises does not before all have read
                what they look at: it may free what it has brought.
        """
        with self._changed:
            self._reading.discard(at)
            self._arrivals[at] += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over(at))
            missing = self._missing(at)
            if missing or self._job.failure is not None:
                self._changed.wait_for(lambda: not self._reading, _READ_S)
            elif reads:
                self._reading.add(at)
        self._job.check()
        if missing:
            raise TransportError(
                missing[0], f"has left; rank {self._ranks[at]} waits for it among {self._ranks}"
            )

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _missing(self, at: int) -> list[int]:
        arrivals = self._arrivals
        return [
            rank for rank, count in zip(self._ranks, arrivals, strict=True) if count < arrivals[at]
        ]

    def _is_over(self, at: int) -> bool:
        missing = self._missing(at)
        return (
            not missing or self._job.failure is not None or not self._job.left.isdisjoint(missing)
        )
