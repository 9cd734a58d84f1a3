"""Lane: sums over ranks, or copies to far memory, beside the computing thread of a rank.

A Reduce is begun where the program has it and runs on a thread of its own, which takes one after
another; the computing thread waits for it right before what needs it.  Sums and copies of memory
release the interpreter's lock, so both threads get on.

    program   B1.0  replicas:stage1.0  B0.0  replicas:stage0.0          U0.0  U1.0
    calls     B1.0  begin              B0.0  wait, replicas:stage0.0    U0.0  U1.0
    lane            replicas:stage1.0 ......

A sum with nothing to do beside it is run by the computing thread itself, once the lane is empty:
sums of a rank never overtake each other.  On a GPU all are, for there they are only queued.
"""

import time
import weakref
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, final

import torch

from penstock.device import of
from penstock.program.instructions import How
from penstock.program.program import Program, Reduce, Update
from penstock.runtime.calls import Bound, Call
from penstock.runtime.child import join

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


_BESIDE = "tied", "replicas", "shards"  # sums that may run beside computes


@final
class Begun:
    """A sum or a copy on a lane: when it began and ended, and how, once that is known."""

    def __init__(self, call: Call) -> None:
        self.call, self.start_s, self.end_s = call, 0.0, 0.0
        self.over: SimpleQueue[BaseException | None] = SimpleQueue()

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
        self.under_way: list[tuple[Reduce, Begun]] = []
        self.gathers: dict[int, Begun] = {}  # by stage

    def bind(self, place: int, call: Call) -> Iterator[Bound]:
        """Yield the calls of the Reduce at `place` of the code, of which `call` is the sum."""
        reduce = self.code[place]
        assert isinstance(reduce, Reduce)
        where = "reduce", -1, reduce.step
        if reduce.how == "shards":  # one at a time: the gradients before take memory
            yield from self.waits("shards")
            stage = int(reduce.bucket.removeprefix("stage"))
            yield Bound(self.rank.shard_of(stage).keep, "versions", "reduce", stage, reduce.step)
        if self._has_company(place, reduce):
            begun, lane = Begun(call), self.rank.lane
            self.under_way.append((reduce, begun))
            yield Bound(lambda: lane.begin(begun), "begin", *where)  # 16 in docs/architecture.md
            return
        if len(reduce.ranks) > 1 or reduce.how not in _BESIDE:
            yield from self.waits()
        yield Bound(call, "collective", *where, ranks=reduce.ranks)
        yield from self._ended(reduce)

    def gather(self, stage: int) -> Iterator[Bound]:
        """Yield the calls of an Unshard: room is made by the thread, the rest beside it."""
        shard = self.rank.shard_of(stage)
        yield Bound(shard.make_room, "versions", "unshard", stage, -1)
        if of(self.rank.device).is_queued:
            yield Bound(shard.gather, "collective", "unshard", stage, -1, shard.sharers.ranks)
            return
        begun, lane = Begun(shard.gather), self.rank.lane
        self.gathers[stage] = begun
        yield Bound(lambda: lane.begin(begun), "begin", "unshard", stage, -1)

    def gathered(self, stage: int) -> Iterator[Bound]:
        """Yield the call that waits for the weights of a stage, if they are on their way."""
        begun = self.gathers.pop(stage, None)
        if begun is not None:
            ranks, lane = self.rank.shard_of(stage).sharers.ranks, "collective"
            yield Bound(begun.wait, lane, "unshard", stage, -1, ranks=ranks, begun=begun)

    def before(self, stage: int) -> Iterator[Bound]:
        """Yield the calls that wait for sums of gradients that a backward of `stage` adds to."""
        if any(stage in self._stages_of(reduce) for reduce, _ in self.under_way):
            yield from self.waits()

    def _stages_of(self, reduce: Reduce) -> tuple[int, ...]:
        if reduce.how == "tied":
            return next(g.stages for g in self.program.tied if g.name == reduce.bucket)
        return (int(reduce.bucket.removeprefix("stage")),)

    def waits(self, how: How | None = None) -> Iterator[Bound]:
        """Yield the calls that wait for all sums under way, or for those of one kind."""
        wanted = [each for each in self.under_way if how in (None, each[0].how)]
        self.under_way = [each for each in self.under_way if each not in wanted]
        for reduce, begun in wanted:
            where = "reduce", -1, reduce.step
            yield Bound(begun.wait, "collective", *where, ranks=reduce.ranks, begun=begun)
            yield from self._ended(reduce)

    def _ended(self, reduce: Reduce) -> Iterator[Bound]:
        """Yield the call that frees what only the sum needed."""
        if reduce.how == "shards":
            stage = int(reduce.bucket.removeprefix("stage"))
            yield Bound(self.rank.shard_of(stage).end, "versions", "reduce", stage, reduce.step)

    def _has_company(self, place: int, reduce: Reduce) -> bool:
        """Return whether anything is done before somebody needs the sum, over several ranks."""
        alone = len(reduce.ranks) == 1 and reduce.how != "shards"
        if alone or reduce.how not in _BESIDE:
            return False
        following = (each for each in self.code[place + 1 :] if not isinstance(each, Reduce))
        return not of(self.rank.device).is_queued and not isinstance(next(following), Update)
