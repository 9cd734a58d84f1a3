"""NCCL: a process group over gloo with the rules of NCCL's.

A communicator is a stream and a thread that works first in, first out; the host waits for it only
when it is made, with its first use, until all its ranks have come.
A send ends when its receive does, so that two ranks who send to each other first wait for ever; one
pair of ranks has one communicator for both directions.  Tensors lie on the device, without gaps.
"""

import ctypes
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from tests.rehearsal.cuda import Event, Stream, current_stream, library
from tests.rehearsal.library import KIND

# isort: split
import torch  # after the device
import torch.distributed as dist

_LIMIT_S = 60.0  # for which a thread of torch may be waited for
_NEVER = timedelta(minutes=10)
_STOPPED = "rehearsal NCCL: the communicator was stopped"
Tensors = Sequence[torch.Tensor]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the CPU in the memory of one of the device.

    Raises:   RuntimeError: NCCL would not take it.
    """
    if tensor.device.type != KIND:
        raise RuntimeError(f"NCCL: tensors must be CUDA and dense, not on {tensor.device}")
    if not tensor.is_contiguous():
        raise RuntimeError("NCCL: tensors must be contiguous")
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    place = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(place, dtype=tensor.dtype).view(tensor.shape)


_numbers = itertools.count(1)


class Work(dist._Work):
    """What was queued; waiting for it orders the current stream, as of NCCL.

    The host does not wait where that is no default stream, before an op is queued there.
    """

    def __init__(self, kept: Tensors) -> None:
        super().__init__()
        self.ended, self.problem, self.over = threading.Event(), "", Event()
        self.kept, self.id = kept, next(_numbers)

    def wait(self, timeout: object = None) -> bool:
        if current_stream().stream_id == 0:
            if not self.ended.wait(_LIMIT_S):
                raise RuntimeError(f"rehearsal NCCL: no end for {_LIMIT_S:.0f} s: a deadlock")
            if self.problem:
                raise RuntimeError(self.problem)
        else:
            library.rehearsal_await(self.id, current_stream().id)
        current_stream().wait_event(self.over)
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Communicator:
    """One stream, and what is queued on it."""

    def __init__(self, *, sums: bool) -> None:
        self.stream = Stream()
        if sums:
            library.rehearsal_sums_on(self.stream.id)
        self.queue = queue.SimpleQueue[tuple[Work, Callable[[], None]]]()
        self.under_way: dict[int, Work] = {}
        self.is_stopped, self.lock = False, threading.Lock()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            work, call = self.queue.get()
            try:
                if not library.rehearsal_settle_work(work.id):
                    raise RuntimeError("rehearsal NCCL: what it is queued behind has no end")
                call()
            except Exception as problem:  # noqa: BLE001 - who waits for it raises it
                work.problem = str(problem) or type(problem).__name__
            self._end(work)

    def _end(self, work: Work) -> None:
        if self.under_way.pop(work.id, None) is not None:
            work.kept = ()
            library.rehearsal_end_work(work.id, work.problem.encode())
            work.ended.set()

    def abort(self) -> None:
        with self.lock:
            self.is_stopped = True
            works = list(self.under_way.values())
        for work in works:
            work.problem = _STOPPED
            self._end(work)

    def issue(self, what: str, reads: Tensors, writes: Tensors, call: Callable[[], None]) -> Work:
        if self.is_stopped:
            raise RuntimeError(_STOPPED)
        self.stream.wait_stream(current_stream())
        for writing, tensors in enumerate((reads, writes)):
            for tensor in tensors:
                library.rehearsal_use(tensor.data_ptr(), writing, self.stream.id, what.encode())
        work = Work([*reads, *writes])
        with self.lock:
            if self.is_stopped:  # meanwhile: nobody would ever end it
                raise RuntimeError(_STOPPED)
            library.rehearsal_begin_work(work.id, self.stream.id)
            work.over.record(self.stream)
            self.under_way[work.id] = work
        self.queue.put((work, call))
        return work


class Group(dist.ProcessGroup):
    """The group of some ranks."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.own, self.all_ranks = rank, range(size)
        gloo, prefix = dist.ProcessGroupGloo, dist.PrefixStore
        self.sums = gloo(prefix("sums", store), rank, size, timeout)
        self.pairs = gloo(prefix("pairs", store), rank, size, timeout)
        self.communicators: dict[object, Communicator] = {}
        self.is_stopped = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "rehearsal"

    def abort(self) -> None:
        """End what waits, as by a communicator that is stopped: what it wrote is no result."""
        self.is_stopped = True
        for communicator in list(self.communicators.values()):
            communicator.abort()

    def _of(self, key: object) -> Communicator:
        if key not in self.communicators:
            self._meet(key)
            self.communicators[key] = Communicator(sums=key == "all")
            if self.is_stopped:  # since, perhaps, that was looked for
                self.communicators[key].abort()
        return self.communicators[key]

    def _meet(self, key: object) -> None:
        """Return once all ranks of a new communicator have come: as with NCCL the host waits."""
        limit, word = timedelta(seconds=_LIMIT_S), torch.zeros(1)
        if not isinstance(key, frozenset):
            self.sums.allreduce([word]).wait(limit)
            return
        (peer,) = key - {self.own}
        given = self.pairs.send([word], peer, 4)
        self.pairs.recv([torch.zeros(1)], peer, 4).wait(limit)
        given.wait(limit)

    def _flattened(self, parts: Tensors) -> Tensors:
        """Return the copy through which torch sends parts that are alike; else nothing."""
        if len({each.numel() for each in parts}) > 1:
            return ()
        size = sum(each.numel() for each in parts)
        flat = torch.empty(size, dtype=parts[0].dtype, device=parts[0].device)
        library.rehearsal_record_stream(flat.data_ptr(), self._of("all").stream.id)
        return (flat,)

    def allreduce(self, tensors: Tensors, op: Any = dist.ReduceOp.SUM) -> Work:
        how, host = getattr(op, "reduceOp", op), _on_host(tensors[0])
        call = lambda: self.sums.allreduce([host], how).wait()  # noqa: E731
        return self._of("all").issue("ncclAllReduce", tensors, tensors, call)

    def allgather(self, outs: Sequence[Tensors], ins: Tensors, opts: Any = None) -> Work:
        return self._gathered(self._flattened(outs[0]), outs[0], ins[0])

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Work:
        parts = out.view(len(self.all_ranks), -1).unbind()
        assert all(part.numel() == own.numel() for part in parts), "NCCL: parts are alike"
        return self._gathered((), parts, own)

    def _gathered(self, kept: Tensors, outs: Tensors, own: torch.Tensor) -> Work:
        """Gather; kept: memory that torch takes besides."""
        rooms, given = [_on_host(each) for each in outs], _on_host(own)

        def call() -> None:
            for rank, room in enumerate(rooms):
                if rank == self.own and room.data_ptr() != given.data_ptr():
                    room.copy_(given)
                if room.numel():
                    self.sums.broadcast(room, rank).wait()

        others = [each for each in outs if each.data_ptr() != own.data_ptr()]
        return self._of("all").issue("ncclAllGather", [own, *kept], others, call)

    def reduce_scatter(self, outs: Tensors, ins: Sequence[Tensors], opts: Any = None) -> Work:
        return self._summed(self._flattened(ins[0]), outs[0], ins[0])

    def _reduce_scatter_base(
        self, out: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> Work:
        return self._summed((), out, whole.view(len(self.all_ranks), -1).unbind())

    def _summed(self, kept: Tensors, out: torch.Tensor, ins: Tensors) -> Work:
        own, parts = _on_host(out), [_on_host(each) for each in ins]

        def call() -> None:
            for rank, part in enumerate(parts):
                whole = part.clone()
                if whole.numel():
                    self.sums.allreduce([whole], dist.ReduceOp.SUM).wait()
                if rank == self.own:
                    own.copy_(whole)

        return self._of("all").issue("ncclReduceScatter", [*ins, *kept], [out], call)

    def alltoall(self, outs: Tensors, ins: Tensors, opts: Any = None) -> Work:
        rooms, parts = [_on_host(each) for each in outs], [_on_host(each) for each in ins]

        def call() -> None:
            under_way: list[Any] = []
            for rank in self.all_ranks:
                if rank == self.own:
                    rooms[rank].copy_(parts[rank])
                    continue
                if rooms[rank].numel():
                    under_way.append(self.pairs.recv([rooms[rank]], rank, 3))
                if parts[rank].numel():
                    under_way.append(self.pairs.send([parts[rank]], rank, 3))
            for work in under_way:
                work.wait()

        return self._of("all").issue("ncclAllToAll", ins, outs, call)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Work:
        host = _on_host(tensors[0])

        def call() -> None:
            self.pairs.send([host], to, 1).wait()
            self.pairs.recv([torch.zeros(1)], to, 2).wait()  # it ends when the receive has

        return self._of(frozenset((self.own, to))).issue("ncclSend", tensors, (), call)

    def recv(self, tensors: Tensors, by: int, tag: int = 0) -> Work:
        host = _on_host(tensors[0])

        def call() -> None:
            self.pairs.recv([host], by, 1).wait()
            self.pairs.send([torch.zeros(1)], by, 2).wait()

        return self._of(frozenset((self.own, by))).issue("ncclRecv", (), tensors, call)


def _begin(backend: str | None = None, *given: Any, **named: Any) -> None:
    _begin_of_torch("rehearsal" if backend in ("nccl", None) else backend, *given, **named)


class _NcclGroup:
    """In place of torch's class of a group, which the CPU's build has not."""

    class Options:
        """What is asked of a group; nothing of it matters here."""

    def __call__(self, store: Any, rank: int, size: int, options: object = None) -> Group:
        return Group(store, rank, size, _NEVER)


dist.Backend.register_backend("rehearsal", Group, devices=[KIND])
_begin_of_torch = dist.init_process_group
dist.init_process_group = _begin
dist.ProcessGroupNCCL = _NcclGroup()  # type: ignore[attr-defined]
