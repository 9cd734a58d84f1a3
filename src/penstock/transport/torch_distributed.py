"""torch.distributed: ranks anywhere, over gloo (host memory) or NCCL (CUDA devices).

A message is packed into one flat buffer, so it costs one operation.

gloo moves a message only once its receiver has told the sender, behind all that goes the same way,
that it has posted the receive; so a plan posts receives early (`Overlap.early`), and the line is
never idle for want of one.  It matches by tag, which is the edge.  NCCL matches by order alone, so
there receives stay where lowering puts them, and the first barrier opens the channels in one order
on all ranks.

NCCL takes what goes between two ranks one after the other, and a send ends with its receive.  So
each pair has two channels, one for each direction: no message waits behind one that comes towards
it.  A receive is posted from a stream of its own, for it would wait for all computes queued before.
What is queued on a device begins in the order in which a rank's program has it, and one order of
all instructions agrees with all programs (program/issue.py), so that no rank stops another even
where a device lets only one of its messages on at a time.

gloo's waits cannot be interrupted, but one operation that times out closes all
connections of its group, and so ends every wait in it.  That is how a thread that
watches the store for an abort gets its rank out of a wait, and how a rank that leaves
tells those who still wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import cycle, pairwise
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import _compat
from penstock.device import of
from penstock.transport.transport import (
    Post,
    Send,
    Store,
    TensorSpec,
    TransportError,
    Wait,
    Waited,
    check_cuts,
    check_members,
    check_message,
    check_peer,
    packed_bytes,
    unpacked,
)

_LOOK_S = 0.1  # how often the store is asked whether somebody has aborted
_PATIENCE = 10  # looks at a wait for one who has left, during which what is under way may come
_GRACE_S = 1.0  # how long a broken connection waits for an abort that explains it
_STUCK = timedelta(seconds=1)  # after which a sum is looked at that has not ended
_BREAK_TAG, _PARTS_TAG = 2**30, 2**29  # no edges
_FAILURE = "failure"
_LEAVES, _SENT_ALL = "rank {} leaves", "rank {} leaves and has sent all"  # keys of the store
_ANYBODY_LEAVES = "a rank leaves"
_NOT_SUMMED_BY_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64)
Group = Any  # a torch ProcessGroup, or one of its backends: their calls are alike


class World(NamedTuple):
    """Which of how many ranks this is, and how some of them connect.

    group:    connects ranks, which are sorted and have this one among them.
    all_call: whether ranks that are not among them have to call it too.
    close:    is called at the end.
    """

    rank: int
    num_ranks: int
    group: Callable[[list[int]], Group]
    all_call: bool = False
    close: Callable[[], None] = lambda: None


def initialised() -> World:
    """Return the world that torch.distributed was initialised with."""

    def group(ranks: list[int]) -> Group:
        return dist.new_group(ranks)  # pyright: ignore[reportUnknownMemberType]

    return World(dist.get_rank(), dist.get_world_size(), group, all_call=True)


@final
class TorchDistributedTransport:
    """One rank's end of a `world`; default: that which torch.distributed was initialised with.

    It has gloo for the CPU, NCCL for CUDA.  All ranks build theirs at the same time.  A thread asks
    `store` for news, so it should be a client of its own (`clone`): a wait on another's would keep
    it.  `groups` are the sets of ranks that will sum or gather, the same list on all ranks, which
    connect them together.
    Of an edge `slots` messages may be unread before `send` blocks; each takes a buffer of
    the message's size.

    Sums are bitwise equal on all ranks, but for more than two their order is gloo's or NCCL's.
    """

    def __init__(
        self,
        device: torch.device,
        store: Store,
        *,
        groups: Sequence[tuple[int, ...]] = (),
        slots: int = 4,
        world: World | None = None,
    ) -> None:
        if slots < 1:
            raise ValueError(f"an edge has {slots} slots; it needs one or more")
        self._device = device
        self._slots = slots
        self._world = initialised() if world is None else world
        self._rank, self._num_ranks = self._world.rank, self._world.num_ranks
        self._waited = Waited()
        self._store = store
        self._failure: tuple[int, str] | None = None
        self._groups: dict[frozenset[int], Group] = {}
        self._everyone = tuple(range(self._num_ranks))
        for ranks in (self._everyone, *groups):
            self._connect(ranks)
        self._peers: set[int] = set()
        self._is_cpu = self._is_open = of(device).is_cpu
        self._ways = self._group_of_each_way()
        self._posting = None if self._is_cpu else of(device).stream()
        self._sent: list[tuple[int, list[dist.Work | None]]] = []
        self._queued: dict[tuple[int, int], deque[tuple[Tensor, dist.Work]]] = {}
        # by thread: ranks, and the store's keys that say they left
        self._waits_for: dict[int, list[tuple[int, str]]] = {}
        self._wait_number = 0
        self._closing, self._news = False, threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="penstock abort", daemon=True)
        self._watcher.start()

    def _group_of_each_way(self) -> tuple[Group, Group]:
        """Return what carries messages to lower ranks, and what those to higher ones."""
        everyone = self._group(self._everyone)
        if self._is_cpu:
            return everyone, everyone
        low, high = (self._world.group([*self._everyone]) for _ in range(2))
        return low, high

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._num_ranks

    @property
    def waited(self) -> Waited:
        return self._waited

    @property
    def is_queued(self) -> bool:
        return not self._is_cpu

    def bind_send(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> Send:
        check_peer(self._rank, self._num_ranks, peer, edge)
        self._peers.add(peer)
        if not self._is_cpu:
            return self._bind_queued_send(edge, peer, specs)
        way = self._ways[peer > self._rank]
        start, finish = _compat.unrecorded(way.send), self._finish
        fail, waited, clock = self._fail_if_failed, self._waited, time.perf_counter
        flats = [self._flat(specs) for _ in range(self._slots)]
        views = [unpacked(flat, specs) for flat in flats]
        works: list[dist.Work | None] = [None] * self._slots
        self._sent.append((peer, works))
        places = cycle(range(self._slots))
        expected = [(torch.Size(spec.shape), spec.dtype) for spec in specs]

        def send(tensors: Sequence[Tensor]) -> None:
            fail()
            if [(tensor.shape, tensor.dtype) for tensor in tensors] != expected:
                check_message(tensors, specs, edge)
            at = next(places)
            before = clock()
            finish(works[at], (peer,))
            waited.to_send_s += clock() - before
            for view, tensor in zip(views[at], tensors, strict=True):
                view.copy_(tensor.detach())
            try:
                works[at] = start([flats[at]], peer, edge)
            except RuntimeError as error:
                raise self._explained(error, (peer,)) from error

        return send

    def _bind_queued_send(self, edge: int, peer: int, specs: tuple[TensorSpec, ...]) -> Send:
        """Return what queues a message; one tensor alone is lent, and kept until it is sent."""
        start = _compat.unrecorded(self._ways[peer > self._rank].send)
        sent = self._queued.setdefault((edge, peer), deque())
        is_lent = len(specs) == 1 and specs[0].size_bytes == packed_bytes(specs) > 0

        def send(tensors: Sequence[Tensor]) -> None:
            self._fail_if_failed()
            check_message(tensors, specs, edge)
            while sent and (len(sent) == self._slots or sent[0][1].is_completed()):
                self._finish(sent[0][1], (peer,))  # what is queued from now on may take its memory
                sent.popleft()
            if is_lent:
                own = tensors[0].detach().resolve_conj().resolve_neg()
                flat = own.contiguous().view(-1).view(torch.uint8)
            else:
                flat = self._flat(specs)
                for view, tensor in zip(unpacked(flat, specs), tensors, strict=True):
                    view.copy_(tensor.detach())
            try:
                sent.append((flat, start([flat], peer, edge)))
            except RuntimeError as error:
                raise self._explained(error, (peer,)) from error

        return send

    @property
    def held_bytes(self) -> int:
        return sum(flat.nbytes for sent in self._queued.values() for flat, _ in sent)

    def bind_receive(
        self, edge: int, peer: int, specs: tuple[TensorSpec, ...], *, ahead: int = 0
    ) -> tuple[Post | None, Wait]:
        check_peer(self._rank, self._num_ranks, peer, edge)
        self._peers.add(peer)
        posted: deque[tuple[Tensor, dist.Work]] = deque()
        start, waited = _compat.unrecorded(self._ways[peer < self._rank].recv), self._waited
        clock, device, posting = time.perf_counter, of(self._device), self._posting

        def begin() -> None:
            flat = self._flat(specs)
            try:
                posted.append((flat, start([flat], peer, edge)))
            except RuntimeError as error:
                raise self._explained(error, (peer,), _SENT_ALL) from error

        def post() -> None:
            if posting is None:
                begin()
                return
            with device.queueing_on(posting):
                begin()

        def wait() -> list[Tensor]:
            self._fail_if_failed()
            if not posted:
                post()
            flat, work = posted[0]
            before = clock()
            self._finish(work, (peer,), _SENT_ALL)
            posted.popleft()  # one that was stopped keeps its memory until all is closed
            waited.to_receive_s += clock() - before
            if posting is not None:  # its memory is that stream's, and read on another
                device.used_on(flat, device.current_stream())
                with device.queueing_on(posting):  # what it hands out again has been received
                    work.wait()
            tensors = unpacked(flat, specs)
            return tensors if len(tensors) < 2 else [tensor.clone() for tensor in tensors]

        return post, wait

    def _flat(self, specs: tuple[TensorSpec, ...]) -> Tensor:
        """Return a buffer for one message; one byte at least, for it must travel."""
        return torch.empty(max(1, packed_bytes(specs)), dtype=torch.uint8, device=self._device)

    def connect(self, groups: Sequence[tuple[int, ...]]) -> None:
        for ranks in groups:
            self._connect(ranks)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        check_members(self._rank, self._num_ranks, ranks)
        if len(ranks) == 1:
            return
        own = tensor.detach()
        flat = own.contiguous().view(-1)
        how = dist.ReduceOp.SUM
        if flat.dtype == torch.bool:
            flat, how = flat.view(torch.uint8), dist.ReduceOp.MAX
        elif self._is_cpu and flat.dtype in _NOT_SUMMED_BY_GLOO:
            flat = flat.to(torch.int64)  # modulo 2**n, this sums as the narrow integer does
        self._collect(ranks, lambda group: group.allreduce([flat], how))
        if flat.data_ptr() != own.data_ptr():
            own.copy_((flat.view(torch.bool) if own.dtype == torch.bool else flat).view(own.shape))

    def all_gather(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Send the own part to each other member; no byte goes a longer way."""
        parts, own = self._parts(whole, cuts, ranks)
        if not self._is_cpu:
            ordered = [parts[ranks.index(rank)] for rank in sorted(ranks)]
            flat = whole.detach()
            if _are_flat(flat, ordered):
                own_part = parts[own]
                self._collect(ranks, lambda g: _compat.gather_flat(g, flat, own_part, ordered))
            else:
                self._collect(ranks, lambda group: group.allgather([ordered], [parts[own]]))
        else:
            self._exchange(ranks, [parts[own]] * len(ranks), parts)

    def reduce_scatter(self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]) -> None:
        """Send each other member its part, and add up those of the own one."""
        parts, own = self._parts(whole, cuts, ranks)
        mine = parts[own]
        if not self._is_cpu:
            ordered = [parts[ranks.index(rank)] for rank in sorted(ranks)]
            flat = whole.detach()
            if _are_flat(flat, ordered):
                self._collect(ranks, lambda g: _compat.scatter_flat(g, mine, flat, ordered))
            else:
                self._collect(ranks, lambda group: group.reduce_scatter([mine], [ordered]))
            return
        came = [mine if place == own else torch.empty_like(mine) for place in range(len(ranks))]
        self._exchange(ranks, parts, came)
        total = came[0] if own == 0 else came[0].add_(came[1])
        for other in came[1 if own == 0 else 2 :]:
            total.add_(other)
        if own != 0:
            mine.copy_(total)

    def _parts(
        self, whole: Tensor, cuts: Sequence[int], ranks: tuple[int, ...]
    ) -> tuple[list[Tensor], int]:
        """Return the part of each member, and the place of this rank among them."""
        check_members(self._rank, self._num_ranks, ranks)
        check_cuts(whole, cuts, ranks)
        flat = whole.detach()
        return [flat[a:b] for a, b in pairwise(cuts)], ranks.index(self._rank)

    def _exchange(
        self, ranks: tuple[int, ...], gives: Sequence[Tensor], takes: Sequence[Tensor]
    ) -> None:
        """Give each other member one tensor and take one, where it has any numbers."""
        self._fail_if_failed()
        group, members = self._group(ranks), sorted(ranks)
        others = [place for place, rank in enumerate(ranks) if rank != self._rank]
        works: list[tuple[dist.Work | None, int]] = []
        try:
            for start, tensors in ((group.recv, takes), (group.send, gives)):
                for place in others:
                    if tensors[place].numel():
                        peer = members.index(ranks[place])
                        works.append((start([tensors[place]], peer, _PARTS_TAG), ranks[place]))
        except RuntimeError as error:
            raise self._explained(error, ranks) from error
        for work, rank in works:
            self._finish(work, (rank,))

    def all_gather_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        check_members(self._rank, self._num_ranks, ranks)
        sizes = [int(size) for size in self._gathered(torch.tensor([len(payload)]), ranks)]
        padded = bytearray(max(sizes) + 1)
        padded[: len(payload)] = payload
        gathered = self._gathered(torch.frombuffer(padded, dtype=torch.uint8), ranks)
        return [
            bytes(tensor[:size].cpu().numpy()) for tensor, size in zip(gathered, sizes, strict=True)
        ]

    def _gathered(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        own = tensor.to(self._device)
        gathered = [torch.empty_like(own) for _ in ranks]
        self._collect(ranks, lambda group: group.allgather([gathered], [own]))
        members = sorted(ranks)  # the order of torch's groups
        return [gathered[members.index(rank)] for rank in ranks]

    def broadcast_bytes(self, payload: bytes, ranks: tuple[int, ...]) -> bytes:
        return self.all_gather_bytes(payload if self._rank == ranks[0] else b"", ranks)[0]

    def swap(
        self, gives: Sequence[Tensor], takes: Sequence[Tensor], ranks: tuple[int, ...]
    ) -> None:
        check_members(self._rank, self._num_ranks, ranks)
        if self._is_cpu:
            self._exchange(ranks, gives, takes)
            return
        order = [ranks.index(rank) for rank in sorted(ranks)]  # that of torch's groups
        given, taken = ([row[place] for place in order] for row in (gives, takes))
        own = sorted(ranks).index(self._rank)
        taken[own] = torch.empty_like(given[own])
        self._collect(ranks, lambda group: group.alltoall(taken, given))

    def bind_memory(self, edge: int, maker: int, reader: int, size_bytes: int) -> None:
        """Return None: ranks may be on other hosts."""

    def barrier(self) -> None:
        if not self._is_open:
            self._open_channels()
        own = torch.zeros(1, device=self._device)
        self.all_reduce(own, self._everyone)
        own.item()  # NCCL's sum is only queued until then

    def _open_channels(self) -> None:
        """Let NCCL connect each pair that has an edge, in one order on all ranks."""
        self._is_open = True
        own = json.dumps([sorted((self._rank, peer)) for peer in self._peers]).encode()
        texts = self.all_gather_bytes(own, self._everyone)
        for low, high in sorted({(low, high) for text in texts for low, high in json.loads(text)}):
            if self._rank in (low, high):
                for sender, way in ((high, self._ways[False]), (low, self._ways[True])):
                    operation = way.send if self._rank == sender else way.recv
                    peer, byte = low + high - self._rank, self._flat(())
                    self._finish(operation([byte], peer, 0), (peer,))

    def _collect(self, ranks: tuple[int, ...], start: Callable[[Group], dist.Work]) -> None:
        self._fail_if_failed()
        try:
            work = start(self._group(ranks))
        except RuntimeError as error:
            raise self._explained(error, ranks) from error
        self._finish(work, ranks, wait=self._await_sum if self._is_cpu else dist.Work.wait)

    def _await_sum(self, work: dist.Work) -> None:
        """Wait for a sum or a gather of gloo, but for none that a failure has left without an end.

        gloo does not tell one that begins while its connections break.
        Raises:   TransportError: another rank has failed, and this did not end it.
        """
        while True:
            try:
                work.wait(_STUCK)
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # raises its own error; none, if it ended as it was looked at
                    return
                self._fail_if_failed()
            else:
                return

    def _connect(self, ranks: tuple[int, ...]) -> None:
        """Connect a set of ranks; all ranks take part where torch numbers groups as they come."""
        members = frozenset(ranks)
        if members in self._groups or not (self._rank in members or self._world.all_call):
            return
        group = self._world.group(sorted(members))
        if self._rank in members:
            self._groups[members] = group

    def _group(self, ranks: tuple[int, ...]) -> Group:
        group = self._groups.get(frozenset(ranks))
        if group is None:
            known = ", ".join(str(tuple(sorted(members))) for members in self._groups)
            raise ValueError(f"the ranks {ranks} are none of the groups {known}")
        return group

    def _finish(
        self,
        work: dist.Work | None,
        ranks: tuple[int, ...],
        left: str = _LEAVES,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        """Wait for `work` with `ranks`; with the key `left`, one says it does no more for it."""
        if work is None:
            return
        self._wait_number += 1
        me = threading.get_ident()
        self._waits_for[me] = [(rank, left) for rank in ranks if rank != self._rank]
        try:
            wait(work)
        except RuntimeError as error:
            raise self._explained(error, ranks, left) from error
        finally:
            self._waits_for[me] = []

    def _fail_if_failed(self) -> None:
        if self._failure is not None:
            raise TransportError(*self._failure)

    def _explained(
        self, error: RuntimeError, ranks: tuple[int, ...], left: str = _LEAVES
    ) -> TransportError:
        """Return what to raise for an operation with `ranks` that torch has given up."""
        others = [rank for rank in ranks if rank != self._rank]
        until = time.monotonic() + _GRACE_S
        while self._failure is None and time.monotonic() < until:
            self._read_failure()
            self._blame_left(self._left([(rank, left) for rank in others]))
            time.sleep(_LOOK_S / 10)
        if self._failure is None:
            text = f"died or cannot be reached any more: {str(error).strip()}"
            if len(others) > 1:
                text = f"has lost one of the ranks {others}: {str(error).strip()}"
            self._publish(others[0] if len(others) == 1 else self._rank, text)
        assert self._failure is not None
        return TransportError(*self._failure)

    def _blame_left(self, left: list[int]) -> None:
        if left and self._failure is None:
            self._failure = left[0], f"has left; rank {self._rank} waits for it"

    def _read_failure(self) -> None:
        try:
            if self._failure is None and self._store.check([_FAILURE]):
                rank, text = json.loads(self._store.get(_FAILURE))
                self._failure = rank, text
        except RuntimeError as error:
            self._failure = self._rank, f"has lost the store: {error}"

    def _publish(self, rank: int, text: str) -> None:
        self._read_failure()
        if self._failure is None:
            self._failure = rank, text
            with suppress(RuntimeError):  # without the store, broken connections tell it
                self._store.set(_FAILURE, json.dumps(self._failure))

    def _watch(self) -> None:
        suspect, looks = 0, 0
        while self._failure is None and not self._closing:
            self._news.wait(_LOOK_S)
            self._read_failure()
            number, waits = self._wait_number, list(self._waits_for.values())
            left = self._left([each for own in waits for each in own])
            looks = looks + 1 if left and number == suspect else 0
            suspect = number
            if looks == _PATIENCE:
                self._blame_left(left)
        if self._failure is not None:
            self._break()

    def _left(self, waits_for: list[tuple[int, str]]) -> list[int]:
        """Return those of the ranks waited for whose key says that they have left."""
        check = self._store.check
        with suppress(RuntimeError):
            if waits_for and check([_ANYBODY_LEAVES]):
                return [rank for rank, left in waits_for if check([left.format(rank)])]
        return []

    def _break(self) -> None:
        """End all waits of this rank.

        An operation with a rank that is gone already fails at once, and ends none.
        """
        if not self._is_cpu:
            for group in (*self._groups.values(), *self._ways):
                group.abort()
            return
        for members, group in list(self._groups.items()):
            for place, rank in enumerate(sorted(members)):
                if rank != self._rank:
                    with suppress(RuntimeError):
                        receive = group.recv([torch.empty(1)], place, _BREAK_TAG)
                        receive.wait(timedelta(milliseconds=1))

    def abort(self, reason: str) -> None:
        self._publish(self._rank, f"failed: {reason}")
        self._news.set()

    def close(self) -> None:
        if self._closing:
            return
        self._tell(_LEAVES)
        with suppress(TransportError):
            for peer, works in self._sent:
                for work in works:
                    self._fail_if_failed()
                    self._finish(work, (peer,))
            for (_, peer), sent in self._queued.items():
                for _, work in sent:
                    self._fail_if_failed()
                    self._finish(work, (peer,))
        self._tell(_SENT_ALL)
        self._closing = True
        self._news.set()
        self._watcher.join()
        if self._failure is not None:
            of(self._device).synchronize()  # what was stopped writes no more: its memory is free
        self._world.close()

    def _tell(self, key: str) -> None:
        with suppress(RuntimeError):
            self._store.set(key.format(self._rank), "")
            self._store.set(_ANYBODY_LEAVES, "")


def _are_flat(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether parts, in the order of torch's group, lie in `whole` as one call takes them.

    That is: alike, one behind the other.  It works in place; of a list of parts that are alike
    torch makes a flat copy, and one of unlike parts it takes part by part, likewise in place.
    """
    places = [part.storage_offset() for part in parts]
    is_alike = all(part.numel() == parts[0].numel() for part in parts)
    return is_alike and places == sorted(places) and len(parts) * parts[0].numel() == whole.numel()
