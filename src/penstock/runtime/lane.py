"""Lane: sums over ranks, or copies to far memory, beside the computing thread of a rank.

A reduction is begun where the program has it and runs on a thread of its own, which takes one after
another; the computing thread waits for it right before what needs it.  Sums and copies of memory
release the interpreter's lock, so both threads get on.

    program   B1.0  replicas:stage1.0  B0.0  replicas:stage0.0          U0.0  U1.0
    calls     B1.0  begin              B0.0  wait, replicas:stage0.0    U0.0  U1.0
    lane            replicas:stage1.0 ......

A sum with nothing to do beside it is run by the computing thread itself, once the lane is empty:
sums of a rank never overtake each other.  So are Collects, which what reads them waits for:

    program   F0.0  sum:F0.0e0  F0.1                   F1.0
    calls     F0.0  begin       F0.1                   wait  F1.0
    lane            sum:F0.0e0 ......

On a device that queues the lane is a stream: a sum is queued on it behind what the computing stream
had to do when it was begun, and what needs the sum is queued behind its end.  Room for it is made,
and what came of it looked at, on the computing stream, whose memory it is.
"""

import time
import weakref
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from penstock.device import Device, of
from penstock.processes.child import join
from penstock.program.instructions import Collect, Compute
from penstock.program.program import Program, Update
from penstock.program.reductions import Reduction, Sum, SumHow
from penstock.runtime.calls import Bound, Call
from penstock.schedule.orders import Action
from penstock.timeline.spans import SpanKind

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


def nothing() -> None:
    """Do nothing before a sum, or after it."""


class SumCalls(NamedTuple):
    """The calls of a sum.

    make:   makes room for it, or puts in order what is summed; by the computing thread.
    sum:    may run beside that thread.
    after:  looks at what was summed, by the computing thread.
    """

    sum: Call
    make: Call = nothing
    after: Call = nothing


@final
class Begun:
    """A sum or a copy on a lane: when it began and ended, and how, once that is known."""

    def __init__(self, call: Call) -> None:
        self.call, self.start_s, self.end_s = call, 0.0, 0.0
        self.over: SimpleQueue[BaseException | None] = SimpleQueue()

    @property
    def times(self) -> tuple[float, float]:
        """Return when it began and ended, the last time that it ran."""
        return self.start_s, self.end_s

    def run(self) -> None:
        problem, self.start_s = None, time.perf_counter()
        try:
            self.call()
        except BaseException as found:  # noqa: BLE001 - raised by the computing thread, in `wait`
            problem = found
        self.end_s = time.perf_counter()
        self.over.put(problem)

    def wait(self) -> None:
        """Return once the sum is over.

        Raises:   what it has raised.
        """
        problem = self.over.get()
        if problem is not None:
            raise problem


@final
class Queued:
    """A sum on a stream beside that of the computes; what comes behind its end waits there."""

    def __init__(self, call: Call, device: Device, stream: Any) -> None:
        self.call, self.device, self.stream = call, device, stream
        self.began: Any = None  # marks on the stream
        self.over: Any = None

    @property
    def times(self) -> tuple[Any, Any]:
        """Return the marks at its begin and end, the last time that it ran."""
        return self.began, self.over

    def begin(self) -> None:
        self.stream.wait_stream(self.device.current_stream())
        with self.device.queueing_on(self.stream):
            self.began = self.device.mark()
            self.call()
            self.over = self.device.mark()

    def wait(self) -> None:
        """Let the computing stream go on behind its end."""
        self.device.current_stream().wait_event(self.over.event)


@final
class Lane:
    """One thread that runs what is begun, in that order; it starts with the first."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Begun | None] = SimpleQueue()
        self._thread: Thread | None = None
        weakref.finalize(self, self._queue.put, None)

    def begin(self, sum_: Begun) -> None:
        """Put a sum behind all others."""
        if self._thread is None:
            run = _run, (self._queue, torch.get_num_threads())
            self._thread = Thread(target=run[0], args=run[1], name="penstock lane", daemon=True)
            self._thread.start()
        self._queue.put(sum_)

    def close(self) -> None:
        """Return once all sums are over and the thread is gone, with all that the kernel knows."""
        if self._thread is not None:
            self._queue.put(None)
            join(self._thread)
            self._thread = None


def _run(queue: SimpleQueue[Begun | None], num_threads: int) -> None:
    torch.set_num_threads(num_threads)  # a setting of each thread, as is the next
    with torch.no_grad():
        while (begun := queue.get()) is not None:
            begun.run()
            del begun  # or it would keep a rank until the next one


class Awaited:
    """Binds the sums of one rank's code: which ones its lane runs, and who waits for them."""

    def __init__(self, rank: "Rank", program: Program) -> None:
        self.rank, self.program, self.code = rank, program, program.code[rank.rank]
        self.under_way: list[tuple[Sum, Begun | Queued, Call]] = []
        self.over: list[tuple[Sum, Call]] = []  # delayed ones, still to be put in their place
        self.gathers: dict[int, Begun | Queued] = {}  # by stage
        self.collects: list[tuple[Collect, Begun | Queued, Call]] = []
        self.device = of(rank.device)
        transport, is_queued = rank.transport, self.device.is_queued
        is_beside = is_queued and (transport.num_ranks == 1 or transport.is_queued)
        self.stream = self.device.stream() if is_beside else None
        self.has_lane = is_beside or not is_queued

    def bind(self, place: int, calls: SumCalls) -> Iterator[Bound]:
        """Yield the calls of the reduction at `place` of the code."""
        reduction = self.code[place]
        assert isinstance(reduction, Reduction)
        is_sum = isinstance(reduction, Sum)
        yield from self._all_collected()
        if isinstance(reduction, Sum) and reduction.how == "shards":
            yield from self.waits("shards")  # one at a time: the gradients before take memory
            stage = reduction.stage
            yield Bound(self.rank.shard_of(stage).keep, "versions", "reduce", stage, reduction.step)
        if isinstance(reduction, Sum) and self._has_company(place, reduction):
            yield from _quiet(calls.make, reduction)
            begin, begun = self._beside(calls.sum)
            self.under_way.append((reduction, begun, calls.after))
            yield Bound(begin, "begin", "reduce", -1, reduction.step)  # 16 in docs/architecture.md
            return
        if len(reduction.ranks) > 1 or not is_sum:
            yield from self.waits(ends=not is_sum)
        yield from _quiet(calls.make, reduction)
        yield Bound(calls.sum, "collective", "reduce", -1, reduction.step, reduction.ranks)
        yield from self._ended(reduction, calls.after)

    def _beside(self, call: Call) -> tuple[Call, Begun | Queued]:
        """Return what begins a call beside the thread, and what waits for it."""
        if self.stream is not None:
            queued = Queued(call, self.device, self.stream)
            return queued.begin, queued
        begun, lane = Begun(call), self.rank.lane
        return lambda: lane.begin(begun), begun

    def gather(self, stage: int) -> Iterator[Bound]:
        """Yield the calls of an Unshard: room is made by the thread, the rest beside it."""
        shard = self.rank.shard_of(stage)
        yield Bound(shard.make_room, "versions", "unshard", stage, -1)
        if not self.has_lane:
            yield Bound(shard.gather, "collective", "unshard", stage, -1, shard.sharers.ranks)
            return
        begin, self.gathers[stage] = self._beside(shard.gather)
        yield Bound(begin, "begin", "unshard", stage, -1)

    def gathered(self, stage: int) -> Iterator[Bound]:
        """Yield the call that waits for the weights of a stage, if they are on their way."""
        begun = self.gathers.pop(stage, None)
        if begun is not None:
            ranks = self.rank.shard_of(stage).sharers.ranks
            yield _wait(begun, ("unshard", stage, -1), ranks)

    def collect(self, place: int, calls: SumCalls) -> Iterator[Bound]:
        """Yield the calls of the Collect at `place` of the code, behind all sums."""
        yield from self.waits()
        instruction = self.code[place]
        assert isinstance(instruction, Collect)
        where = "collect", *instruction.of[1:]
        following = (each for each in self.code[place + 1 :] if isinstance(each, Compute))
        is_next = self._reads(next(following).action, instruction)
        if not self.has_lane or (is_next and not self.collects):
            call = partial(_one_after_the_other, calls.make, calls.sum, calls.after)
            yield Bound(call, "collective", *where, ranks=instruction.ranks)
            return
        yield Bound(calls.make, "versions", *where)
        begin, begun = self._beside(calls.sum)
        self.collects.append((instruction, begun, calls.after))
        yield Bound(begin, "begin", *where)

    def collected(self, action: Action) -> Iterator[Bound]:
        """Yield the calls that wait for what an action reads, if it is still collected."""
        for each in [one for one in self.collects if self._reads(action, one[0])]:
            yield from self._taken(each)

    def _all_collected(self) -> Iterator[Bound]:
        while self.collects:
            yield from self._taken(self.collects[0])

    def _taken(self, one: "tuple[Collect, Begun | Queued, Call]") -> Iterator[Bound]:
        """Yield the calls that wait for a Collect and put what came in its place."""
        self.collects.remove(one)
        instruction, begun, after = one
        where = "collect", *instruction.of[1:]
        yield _wait(begun, where, instruction.ranks)
        yield Bound(after, "versions", *where)

    def _reads(self, action: Action, collect: Collect) -> bool:
        """Return whether an action reads what is collected, or comes behind one that does."""
        edge = self.program.edges[collect.edge]
        if (action.stage, action.micro_batch) != (edge.target, collect.of.micro_batch):
            return False
        return (edge.kind == "F") == (action.kind == "F")

    def before(self, stage: int) -> Iterator[Bound]:
        """Yield the calls that wait for sums of gradients that a backward of `stage` adds to."""
        added = (each for each, _, _ in self.under_way if each.how != "delayed")
        if any(stage in self._stages_of(one) for one in added):
            yield from self.waits(ends=False)

    def _stages_of(self, wanted: Sum) -> tuple[int, ...]:
        if wanted.how == "tied":
            return next(g.stages for g in self.program.graph.tied if g.name == wanted.bucket)
        return (wanted.stage,)

    def waits(self, how: SumHow | None = None, *, ends: bool = True) -> Iterator[Bound]:
        """Yield the calls that wait for all sums under way, or for those of one kind.

        ends:  whether all gradients of the step are there, which delayed sums are to replace.
        """
        wanted = [each for each in self.under_way if how in (None, each[0].how)]
        self.under_way = [each for each in self.under_way if each not in wanted]
        for one, begun, after in wanted:
            yield _wait(begun, ("reduce", -1, one.step), one.ranks)
            if one.how == "delayed":
                self.over.append((one, after))
            else:
                yield from self._ended(one, after)
        over, self.over = (self.over, []) if ends else ([], self.over)
        for one, after in over:
            yield from self._ended(one, after)

    def _ended(self, reduction: Reduction, after: Call) -> Iterator[Bound]:
        """Yield the calls that look at a sum and free what only it needed."""
        yield from _quiet(after, reduction)
        if isinstance(reduction, Sum) and reduction.how == "shards":
            stage = reduction.stage
            yield Bound(self.rank.shard_of(stage).end, "versions", "reduce", stage, reduction.step)

    def _has_company(self, place: int, wanted: Sum) -> bool:
        """Return whether anything is done before somebody needs the sum, over several ranks."""
        if wanted.how == "delayed":
            return True
        if len(wanted.ranks) == 1 and wanted.how != "shards":
            return False
        following = (each for each in self.code[place + 1 :] if not isinstance(each, Reduction))
        return self.has_lane and not isinstance(next(following), Update)


def _one_after_the_other(*calls: Call) -> None:
    for call in calls:
        call()


def _quiet(call: Call, reduction: Reduction) -> Iterator[Bound]:
    """Yield a call that belongs to a sum, if it does anything."""
    if call is not nothing:
        yield Bound(call, "versions", "reduce", -1, reduction.step)


def _wait(begun: Begun | Queued, where: tuple[SpanKind, int, int], ranks: tuple[int, ...]) -> Bound:
    """Return the call that waits for what was begun."""
    return Bound(begun.wait, "collective", *where, ranks=ranks, begun=begun)
