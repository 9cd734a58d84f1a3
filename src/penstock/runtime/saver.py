"""Saver: how a rank writes its checkpoints, as a rule while it trains on.

At the end of a step it copies its part of the state into memory (snapshot.py) that a process beside
it writes from (writer.py); training waits only for the copy.  A checkpoint that something waits for
- the last one, one that is validated, one before another plan - is written at once, by all ranks
together; so are all where there is no memory for a copy.
"""

import json
import logging
import math
import os
import secrets
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import penstock
from penstock.cluster.machine import free_bytes
from penstock.errors import CheckpointError
from penstock.runtime import checkpoint, folders
from penstock.runtime.control import Control
from penstock.runtime.snapshot import Snapshot, described
from penstock.runtime.transport import Transport, TransportError
from penstock.runtime.transport.shared_memory import host_key
from penstock.runtime.writer import Order, Reply
from penstock.typed import typed

State = tuple[Mapping[str, Tensor], Mapping[str, object]]  # tensors and plain values by key
_SPARE = 1.25  # times the bytes of the copies that have to be free for them
_PATIENCE_S = 600.0  # for a process to end that nobody orders anything any more
_WRITER = "penstock.runtime.writer"
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saves:
    """What the checkpoints of a rank took that were written while it trained on.

    size_bytes:  of its part of the last one.
    blocked_s:   for which training stood still, of each.
    written_s:   from then on until all ranks' parts were there, of each.
    waited:      how many had to wait for the one before.
    postponed:   how many, due by the clock, were put off until the one before was there.
    every_s:     after which one was due at the end, where that follows from failures.
    """

    size_bytes: int = 0
    blocked_s: tuple[float, ...] = ()
    written_s: tuple[float, ...] = ()
    waited: int = 0
    postponed: int = 0
    every_s: float | None = None


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Which checkpoints stay, and when they are due.

    mtbf_s:  mean seconds between failures, by which they are due; None: they are due otherwise.
    """

    keep: folders.Keep = folders.Keep()  # noqa: RUF009 - a frozen record
    mtbf_s: float | None = None


def interval_s(cost_s: float, mtbf_s: float, written_s: float = 0.0) -> float:
    """Return after how many seconds the next checkpoint is due, so that least time is lost.

    sqrt(2 * cost_s * mtbf_s), at least `written_s`, which writing one takes beside the steps.

    Ignores:  failures while one is written, and before as many steps as lie between two; that
              failures are not equally likely at all times.
    Source:   Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly,
              "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006.
    """
    return max(math.sqrt(2 * cost_s * mtbf_s), written_s)


class _Agreed(NamedTuple):
    """What all ranks know of each other: a name for their attempts, and which have a part."""

    token: str
    ranks: tuple[int, ...]


class Saver:
    """Writes the checkpoints of one rank into the folder `checkpoints`."""

    def __init__(
        self,
        checkpoints: Path,
        transport: Transport,
        control: Control,
        policy: SavePolicy = SavePolicy(),
    ) -> None:
        self.checkpoints, self.transport = checkpoints, transport
        self.control, self.policy = control, policy
        self._costs_s: list[float] = []
        if policy.mtbf_s is not None:
            control.every_s = math.inf  # until it is known what one costs
        self.told = Saves()
        self._agreed: _Agreed | None = None
        self._writer: _Beside | None = None
        self._pending: int | None = None  # the step whose checkpoint is being written
        self._put_off = self._is_aside = False

    def begin(self, state: State | None) -> None:
        """Make ready to write while training goes on; every rank calls it at the same time.

        state:    as it is now; a later one may be larger.
        """
        size = 0 if state is None else sum(p.size_bytes for p in described(state[0]))
        own = {"part": state is not None, "bytes": size, "free": free_bytes(), "host": host_key()}
        text = json.dumps({**own, "token": secrets.token_hex(4)}).encode()
        told = [
            json.loads(each)
            for each in self.transport.all_gather_bytes(text, _everyone(self.transport))
        ]
        if self.policy.mtbf_s is not None:
            self.control.every_s = 0.0  # the first one tells what one costs
        if not _is_room(told):
            if self.transport.rank == 0:
                log.warning("no memory for copies of the state: training waits for checkpoints")
            return
        ranks = tuple(rank for rank, each in enumerate(told) if each["part"])
        self._agreed = _Agreed(f"-{told[0]['token']}", ranks)
        if state is not None:
            self._writer = _Beside(self._order(0, {}, size))

    def _order(self, step: int, plain: Mapping[str, object], size_bytes: int) -> Order:
        assert self._agreed is not None, "`begin` is called before"
        place, (token, ranks) = str(self.checkpoints.absolute()), self._agreed
        own = step, self.transport.rank, token, ranks, size_bytes, self.policy.keep
        return Order(place, *own, plain=dict(plain))

    # -- a checkpoint -----------------------------------------------------------------------------

    def save(self, step: int, state: State | None, *, waits: bool) -> None:
        """Write the checkpoint after `step` steps; `state` is this rank's part, if any.

        waits:    whether it is complete on return; every rank says the same.
        Raises:   CheckpointError: this rank cannot write it, or could not write the one before.
                  TransportError: another one cannot.
        """
        self._is_aside = not waits and self._agreed is not None
        if not self._is_aside:
            self.settle()
            save(self.checkpoints, step, self.transport, state, self.policy.keep)
            return
        if self.is_writing():
            if not self.told.waited and self._is_first:
                log.warning("step %d waits for the checkpoint after step %s", step, self._pending)
            self._count(waited=self.told.waited + 1)
        self.settle()
        if state is not None and self._writer is not None:
            pieces = described(state[0])
            order = self._order(step, state[1], sum(piece.size_bytes for piece in pieces))
            self._count(size_bytes=order.size_bytes)
            self._writer.write(replace(order, pieces=tuple(pieces)), state[0])
        self._pending, self._put_off = step, False

    @contextmanager
    def timed(self) -> Generator[None]:
        """Count what is done meanwhile as the time for which a checkpoint blocks training."""
        start_s = time.monotonic()
        yield
        seconds = time.monotonic() - start_s
        if self._is_aside:
            self._count(blocked_s=(*self.told.blocked_s, seconds))
        if self.policy.mtbf_s is not None and (self._is_aside or self._agreed is None):
            self._costs_s.append(seconds)
            written_s = max(self.told.written_s, default=0.0)
            due_s = interval_s(statistics.median(self._costs_s), self.policy.mtbf_s, written_s)
            self.control.every_s = due_s
            self._count(every_s=due_s)

    def is_put_off(self) -> bool:
        """Return whether a checkpoint that is due by the clock is put off: one is being written."""
        if not self.is_writing():
            return False
        if not self._put_off:
            self._put_off = True
            if not self.told.postponed:
                about = "a checkpoint is put off until that after step %s is there"
                log.warning(about, self._pending)
            self._count(postponed=self.told.postponed + 1)
        return True

    @property
    def _is_first(self) -> bool:
        return self._agreed is not None and self.transport.rank == self._agreed.ranks[0]

    def is_writing(self) -> bool:
        """Return whether the last checkpoint is not complete yet.

        Raises:   as `check`.
        """
        self.check()
        if self._pending is not None and self._writer is None:
            folder = folders.folder_of(self.checkpoints, self._pending)
            self._pending = None if (folder / "state.json").exists() else self._pending
        return self._pending is not None

    def check(self) -> None:
        """Raise if the checkpoint that is being written has failed; costs a microsecond.

        Raises:   CheckpointError: this rank cannot write its part.
                  TransportError: another one cannot.
        """
        if self._pending is not None and self._writer is not None:
            self._done(self._writer.answer(0.0))

    def settle(self) -> None:
        """Return once the checkpoint that is being written is complete; a rank without a part, now.

        Raises:   as `check`.
        """
        if self._pending is not None and self._writer is not None:
            self._done(self._writer.answer(None))
        self._pending = None

    def _done(self, answer: Reply | None) -> None:
        if answer is None:
            return
        self._pending = None
        if answer.problem:
            raise CheckpointError(answer.problem, hint=answer.hint)
        if answer.follows:
            assert self._agreed is not None, "something was ordered"
            others = [rank for rank in self._agreed.ranks if rank != self.transport.rank]
            raise TransportError(others[0], "cannot write its part of a checkpoint")
        self._count(written_s=(*self.told.written_s, answer.seconds))

    def _count(self, **changed: Any) -> None:
        self.told = replace(self.told, **changed)

    def close(self) -> None:
        """End the process that writes, when it has completed what was ordered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@contextmanager
def saving(
    checkpoints: Path | None,
    transport: Transport,
    control: Control,
    policy: SavePolicy = SavePolicy(),
) -> Generator[Saver | None]:
    """Give what writes a rank's checkpoints; at the end all is there that was begun.

    control:  which by the clock asks for none while one is being written, and learns when the next
              one is due, where that follows from failures.
    """
    if checkpoints is None:
        yield None
        return
    saver = Saver(checkpoints, transport, control, policy)
    control.put_off = saver.is_put_off
    try:
        yield saver
    finally:
        saver.close()


def _is_room(told: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether every host has memory for the copies of its ranks."""
    for host in {each["host"] for each in told}:
        rows = [each for each in told if each["host"] == host]
        size = sum(each["bytes"] for each in rows)
        if _SPARE * size > min(each["free"] for each in rows):
            return False
    return True


class _Beside:
    """The process beside a rank, and the memory that both share."""

    def __init__(self, order: Order) -> None:
        self.snapshot = Snapshot()
        self.snapshot.grow(order.size_bytes)
        self.lock = folders.shared_lock(Path(order.checkpoints))
        given = self.snapshot.file, self.lock
        found = str(Path(penstock.__file__).parent.parent), os.environ.get("PYTHONPATH", "")
        self.process = subprocess.Popen(
            [sys.executable, "-m", _WRITER, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=given,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
        )
        self._poll = select.poll()
        self._poll.register(self._out, select.POLLIN)
        self._has_room = False
        self._send(replace(order, size_bytes=self.snapshot.size_bytes))

    @property
    def _out(self) -> Any:
        assert self.process.stdout is not None, "it is a pipe"
        return self.process.stdout

    def _send(self, order: Order) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        try:
            self.process.stdin.write(order.line())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def write(self, order: Order, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors and have them written; nothing else is being written.

        Raises:   CheckpointError: there is no memory for the copy.
        """
        if not self._has_room:
            self._has_room = True
            room = self.answer(None)
            assert room is not None, "it was waited for"
            if room.problem:
                raise CheckpointError(room.problem, hint=room.hint)
        if order.size_bytes > self.snapshot.size_bytes:
            self.snapshot.grow(order.size_bytes)
            with folders.writing(order.hidden):
                os.posix_fallocate(self.snapshot.file, 0, order.size_bytes)
        self.snapshot.take(tensors, order.pieces)
        folders.lock(self.lock)
        self._send(replace(order, size_bytes=self.snapshot.size_bytes))

    def answer(self, wait_s: float | None) -> Reply | None:
        """Return the next answer; None where it does not come in `wait_s` seconds.

        Raises:   CheckpointError: the process is not there any more.
        """
        if not self._poll.poll(None if wait_s is None else 1000 * wait_s):
            return None
        line = self._out.readline()
        if not line:
            raise self._gone()
        return typed(Reply, json.loads(line))

    def _gone(self) -> CheckpointError:
        code = self.process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"left ({code})"
        hint = "is there enough memory for it? `dmesg` shows kills" if code == -9 else ""
        return CheckpointError(f"the process that writes checkpoints {how}", hint=hint)

    def close(self) -> None:
        """Return once the process has written what it was ordered to, and has ended."""
        with suppress(BrokenPipeError):
            self.process.communicate(timeout=_PATIENCE_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.snapshot.close()
        os.close(self.lock)


# -- at once --------------------------------------------------------------------------------------


def save(
    checkpoints: Path,
    step: int,
    transport: Transport,
    state: State | None,
    keep: folders.Keep = folders.Keep(),  # noqa: B008 - a frozen record
) -> None:
    """Write a checkpoint together with all other ranks; `state` is this rank's part, if any.

    Raises:   CheckpointError: this rank cannot write.  TransportError: another one cannot.
              In both cases nothing half-written is left.
    """

    def write() -> None:
        if state is not None:
            checkpoint.write_part(checkpoints, step, transport.rank, state)

    def finish() -> None:
        if transport.rank == 0:
            checkpoint.finish(checkpoints, step)
            checkpoint.tidy(checkpoints, keep)

    problem = _problem_of(write)
    failed = _failed(transport, problem)
    if not failed:
        problem = _problem_of(finish)
        failed = _failed(transport, problem)
    if failed:
        if transport.rank == 0:
            checkpoint.discard(checkpoints)
        with suppress(TransportError):  # of a rank that has raised already
            transport.barrier()  # the first one to raise ends all others
        raise problem or TransportError(failed[0], "cannot write its part of a checkpoint")


def _problem_of(call: Callable[[], None]) -> CheckpointError | None:
    try:
        call()
    except CheckpointError as problem:
        return problem
    return None


def _failed(transport: Transport, problem: CheckpointError | None) -> list[int]:
    """Return the ranks that have a problem; every rank asks at the same time."""
    told = transport.all_gather_bytes(b"" if problem is None else b"failed", _everyone(transport))
    return [rank for rank, word in enumerate(told) if word]


def _everyone(transport: Transport) -> tuple[int, ...]:
    return tuple(range(transport.num_ranks))
