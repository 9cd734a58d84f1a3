"""Saver: how a rank writes its checkpoints, as a rule while it trains on.

At the end of a step it copies its part of the state into memory (snapshot.py) that a process beside
it writes from (writer.py); training waits only for the copy.  A checkpoint that something waits for
- the last one, one that is validated, one before another plan - is written at once, by all ranks
together; so are all where there is no memory for a copy.

Where ranks may come and go, one Saver serves a rank in all its generations.  A checkpoint that is
being written when a generation breaks is completed where all have ordered their parts; else it is
dropped, as it is where a process that writes dies, and the ranks that are left write another one.
"""

import json
import logging
import math
import secrets
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from penstock.checkpoints import checkpoint, folders
from penstock.checkpoints.beside import Beside, WriterGoneError
from penstock.checkpoints.control import Control
from penstock.checkpoints.snapshot import described
from penstock.checkpoints.writer import DROP, LOST, Order, Reply
from penstock.cluster.machine import free_bytes
from penstock.errors import CheckpointError
from penstock.transport.shared_memory import host_key
from penstock.transport.transport import Transport, TransportError

State = tuple[Mapping[str, Tensor], Mapping[str, object]]  # tensors and plain values by key
_SPARE = 1.25  # times the bytes of the copies that have to be free for them
_LOOK_S = 0.05  # between looks whether a rank is lost, for which what is waited for never comes
_MOST_DEATHS = 2  # of processes that write, one after the other, none of which has completed one
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
    """Where checkpoints are written, when they are due, and which of them stay.

    folder:          of all of them; None: none is written.
    every:           steps after which one is due, at the end of a window; one is at the end of all.
    validate_every:  steps after which one is due and validated; 0: never.
    every_s:         seconds after which one is due besides.
    mtbf_s:          mean seconds between failures, by which they are due; None: they are not.
    """

    folder: Path | None = None
    every: int = 0
    validate_every: int = 0
    every_s: float | None = None
    keep: folders.Keep = folders.Keep()  # noqa: RUF009 - a frozen record
    mtbf_s: float | None = None

    def writes_aside(self, ends: Iterable[int]) -> bool:
        """Return whether one may be due at one of some steps for which nothing waits.

        ends:  of windows, but for the last.
        """
        if self.every_s is not None or self.mtbf_s is not None:
            return True
        due = (step for step in ends if is_due(step, self.every))
        return any(not is_due(step, self.validate_every) for step in due)


def is_due(step: int, every: int) -> bool:
    """Return whether something that is done every so many steps, or never, is done after `step`."""
    return every > 0 and step % every == 0


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
    """Writes the checkpoints of one rank into the folder that its policy names."""

    def __init__(self, policy: SavePolicy, transport: Transport, control: Control) -> None:
        assert policy.folder is not None, "there is somewhere to write"
        self.checkpoints, self.transport = policy.folder, transport
        self.control, self.policy = control, policy
        self._costs_s: list[float] = []
        if policy.mtbf_s is not None:
            control.every_s = math.inf  # until it is known what one costs
        self.told = Saves()
        self._agreed: _Agreed | None = None
        self._writer: Beside | None = None
        self._pending: Order | None = None  # the checkpoint that is being written
        self._is_ours = False  # whether the process beside this rank writes a part of it
        self._put_off = self._is_aside = False
        self._news: Callable[[], None] | None = None
        self._attempt = ""
        self._is_older = False  # whether an older generation ordered it
        self._lapsed, self._deaths = False, 0

    def begin(self, state: State | None, *, is_far: bool = False) -> None:
        """Make ready to write while training goes on; every rank calls it at the same time.

        state:    as it is now; a later one may be larger.
        is_far:   whether some of it is in far memory: there is no room for a copy then.
        """
        size = 0 if state is None else sum(p.size_bytes for p in described(state[0]))
        held = 0 if self._writer is None else self._writer.snapshot.size_bytes
        lacks = max(0, size - held)
        own = {"part": state is not None, "bytes": lacks, "host": host_key()}
        own["free"] = -1 if is_far else free_bytes()
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
        if state is not None and self._writer is None:
            self._writer = Beside(self._order(0, {}, size))

    def _order(self, step: int, plain: Mapping[str, object], size_bytes: int) -> Order:
        assert self._agreed is not None, "`begin` is called before"
        place, (token, ranks) = str(self.checkpoints.absolute()), self._agreed
        own = step, self.transport.rank, token, ranks, size_bytes, self.policy.keep
        return Order(place, *own, plain=dict(plain))

    # -- generations ------------------------------------------------------------------------------

    def enter(
        self,
        transport: Transport,
        news: Callable[[], None],
        generation: int,
        *,
        due: int | None = None,
    ) -> None:
        """Serve another generation of ranks, or the first one, of which some may be lost.

        news:     raises where one is lost.
        due:      the step after which the generation before was to write one, if it was.
        """
        if due is not None and (self._pending is None or self._pending.step != due):
            there = folders.folder_of(self.checkpoints, due) / "state.json"
            self._lapsed = self._lapsed or not there.exists()
        self.transport, self._news, self._attempt = transport, news, f"-g{generation}"
        self._agreed, self._is_older = None, True
        if not self._is_ours:
            self._pending = None

    def leave(self) -> None:
        """Note that a rank is lost: its part of the checkpoint that is being written may lack."""
        if self._pending is not None and self._is_ours and self._writer is not None:
            self._writer.say(LOST)

    @property
    def has_lapsed(self) -> bool:
        """Return whether a checkpoint was dropped, and none was written in its place."""
        return self._lapsed

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
            save(self.checkpoints, step, self.transport, state, self._terms)
            self._lapsed = False
            return
        if self.is_writing() and not self._is_older:
            if not self.told.waited and self._is_first:
                before = None if self._pending is None else self._pending.step
                log.warning("step %d waits for the checkpoint after step %s", step, before)
            self._count(waited=self.told.waited + 1)
        self.settle()
        self._pending = self._order(step, {}, 0)
        self._lapsed = self._put_off = self._is_older = self._is_ours = False
        if state is not None and self._writer is not None:
            self._have_written(self._writer, state)

    @property
    def _terms(self) -> "AtOnce":
        return AtOnce(self.policy.keep, self._attempt, clears=self._news is not None)

    def _have_written(self, writer: Beside, state: State) -> None:
        """Copy this rank's part of the pending checkpoint, and order it."""
        assert self._pending is not None, "it was made"
        pieces = described(state[0])
        size, stale = sum(piece.size_bytes for piece in pieces), ()
        if self._is_first and self._news is not None:
            stale = folders.left_over(self.checkpoints, self._pending.token)
        order = replace(self._pending, size_bytes=size, stale=stale, pieces=tuple(pieces))
        self._count(size_bytes=size)
        self._is_ours = True
        try:
            writer.write(replace(order, plain=dict(state[1])), state[0])
        except WriterGoneError as problem:
            self._done(self._dropped(problem))

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
                log.warning(about, None if self._pending is None else self._pending.step)
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
        if self._pending is not None and not self._is_ours and self._pending.is_there:
            self._pending = None
        return self._pending is not None

    def check(self) -> None:
        """Raise if the checkpoint that is being written has failed; costs a microsecond.

        Raises:   CheckpointError: this rank cannot write its part.
                  TransportError: another one cannot.
        """
        if self._pending is not None and self._is_ours:
            self._done(self._heard(0.0))

    def settle(self) -> None:
        """Return once the checkpoint that is being written is complete; a rank without a part, now.

        One that an older generation ordered is dropped, unless it is complete.
        Raises:   as `check`.
        """
        if self._pending is not None and self._is_ours:
            if self._is_older and self._writer is not None:
                self._writer.say(DROP)
            while (answer := self._heard(None if self._news is None else _LOOK_S)) is None:
                assert self._news is not None, "it waits for an answer"
                self._news()
            self._done(answer)
        self._pending = None

    def _heard(self, wait_s: float | None) -> Reply | None:
        assert self._writer is not None, "it was ordered"
        try:
            return self._writer.answer(wait_s)
        except WriterGoneError as problem:
            return self._dropped(problem)

    def _dropped(self, problem: WriterGoneError) -> Reply:
        """Have another process write from now on; return what became of the checkpoint.

        Raises:   WriterGoneError: as the run ends with it, or it happens again and again.
        """
        assert self._writer is not None, "it is gone"
        assert self._pending is not None, "it was ordered"
        order, size = self._pending, self._writer.snapshot.size_bytes
        folders.give_up(order.hidden, order.rank)
        self._deaths += 1
        if self._news is None or self._deaths > _MOST_DEATHS:
            raise problem
        self._writer.close()
        self._writer = Beside(replace(order, step=0, size_bytes=size))
        return Reply(order.step, 0.0, follows=True)

    def _done(self, answer: Reply | None) -> None:
        if answer is None:
            return
        order, self._pending, self._is_ours = self._pending, None, False
        if answer.problem:
            raise CheckpointError(answer.problem, hint=answer.hint)
        if not answer.follows:
            self._deaths = 0
            self._count(written_s=(*self.told.written_s, answer.seconds))
        elif self._news is not None:
            self._lapsed = True
        else:
            assert order is not None, "something was ordered"
            others = [rank for rank in order.ranks if rank != order.rank]
            raise TransportError(others[0], "cannot write its part of a checkpoint")

    def _count(self, **changed: Any) -> None:
        self.told = replace(self.told, **changed)

    def let_go(self) -> None:
        """Be dead for the process that writes; `close` then waits for its end alone."""
        if self._writer is not None:
            self._writer.let_go()

    def close(self) -> None:
        """End the process that writes, when it has completed what was ordered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@contextmanager
def saving(policy: SavePolicy, transport: Transport, control: Control) -> Generator[Saver | None]:
    """Give what writes a rank's checkpoints, if any are; at the end all is there that was begun.

    control:  which by the clock asks for none while one is being written, and learns when the next
              one is due, where that follows from failures.
    """
    if policy.folder is None:
        yield None
        return
    saver = Saver(policy, transport, control)
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


# -- at once --------------------------------------------------------------------------------------


class AtOnce(NamedTuple):
    """How a checkpoint is written at once.

    attempt:  tells what these ranks write from what others left half-written.
    clears:   whether that is removed: whoever wrote it is lost.
    """

    keep: folders.Keep = folders.Keep()
    attempt: str = ""
    clears: bool = False


def save(
    checkpoints: Path,
    step: int,
    transport: Transport,
    state: State | None,
    terms: AtOnce = AtOnce(),  # noqa: B008 - a frozen record
) -> None:
    """Write a checkpoint together with all other ranks; `state` is this rank's part, if any.

    Raises:   CheckpointError: this rank cannot write.  TransportError: another one cannot.
              In both cases nothing half-written is left.
    """

    def write() -> None:
        if state is not None:
            checkpoint.write_part(checkpoints, step, transport.rank, state, terms.attempt)

    def finish() -> None:
        if transport.rank == 0:
            checkpoint.finish(checkpoints, step, terms.attempt)
            checkpoint.tidy(checkpoints, terms.keep)
            if terms.clears:
                folders.clear(checkpoints, folders.left_over(checkpoints, ""))

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
