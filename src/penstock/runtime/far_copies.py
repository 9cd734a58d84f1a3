"""Moves: binds the copies of one rank to far memory and back, and those that run beside computes.

    program   F0.0  F0.0>>far  F0.1  F0.0>far
    calls     F0.0  begin      F0.1  wait, end
    lane            copy ......

A copy that was begun runs on a lane, one to far memory and one back at a time.  Its room is made,
and what was copied is let go, by the computing thread.  On a GPU lanes are streams: a copy is
queued on one behind what was queued before, and what comes behind its end waits for it there.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.device import Device, of
from penstock.program.program import BeginOffload, BeginReload, Offload, Reload
from penstock.runtime.calls import Bound, Call
from penstock.runtime.lane import Begun, Lane, Queued
from penstock.schedule.schedule import Action
from penstock.state.copies import Move

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank


class _BegunMove:
    """A move that a lane may run, made anew each time that it begins."""

    def __init__(self, make: Callable[[], Move], lane: Lane) -> None:
        self.make, self.lane = make, lane
        self.begun = Begun(self._run)
        self.move: Move | None = None

    def begin(self) -> None:
        self.move = self.make()
        self.lane.begin(self.begun)

    def wait(self) -> None:
        self.begun.wait()
        assert self.move is not None, "it was begun"
        self.move.end()
        self.move = None

    def _run(self) -> None:
        assert self.move is not None, "it was begun"
        self.move.copy()


class _QueuedMove:
    """A move on a stream; what its thread frees or makes is ordered by its own stream."""

    def __init__(self, make: Callable[[], Move], device: Device, stream: Any) -> None:
        self.make, self.begun = make, Queued(self._run, device, stream)
        self.move: Move | None = None

    def begin(self) -> None:
        self.move = self.make()
        self.begun.begin()

    def wait(self) -> None:
        self.begun.wait()
        assert self.move is not None, "it was begun"
        self.move.end()
        self.move = None

    def _run(self) -> None:
        assert self.move is not None, "it was begun"
        self.move.copy()


class Moves:
    """Binds Offloads and Reloads, and what begins them."""

    def __init__(self, rank: "Rank") -> None:
        self.rank = rank
        self.begun: dict[tuple[bool, Action], _BegunMove | _QueuedMove] = {}
        self.device = of(rank.device)
        self.streams = [self.device.stream() for _ in range(2 * self.device.has_copy_engine)]

    def bind(self, instruction: Offload | Reload | BeginOffload | BeginReload) -> Bound:
        """Return the call of an instruction."""
        of = instruction.of
        is_reload = isinstance(instruction, Reload | BeginReload)
        where = ("reload" if is_reload else "offload"), of.stage, of.micro_batch
        if isinstance(instruction, BeginOffload | BeginReload):
            made = self._begun(self._move(of, is_reload=is_reload), is_reload=is_reload)
            self.begun[is_reload, of] = made
            return Bound(made.begin, "begin", *where)
        copy = self.begun.pop((is_reload, of), None)
        if copy is not None:
            return Bound(copy.wait, "copy", *where, begun=copy.begun)
        return Bound(_whole(self._move(of, is_reload=is_reload)), "copy", *where)

    def _begun(self, make: Callable[[], Move], *, is_reload: bool) -> _BegunMove | _QueuedMove:
        if self.streams:
            return _QueuedMove(make, self.device, self.streams[is_reload])
        return _BegunMove(make, self.rank.copy_lanes[is_reload])

    def _move(self, of: Action, *, is_reload: bool) -> Callable[[], Move]:
        """Return what makes the move of an Offload or a Reload."""
        if of.kind == "W":
            shard = self.rank.shard_of(of.stage)
            return shard.reload if is_reload else shard.offload
        if of.kind == "U":
            state = self.rank.weights_of(of.stage).far()
            if state is None:
                return lambda: Move(_nothing, _nothing)
            return state.reload if is_reload else state.offload
        frames = self.rank.far_frames(of.stage)
        frame = self.rank.frames[of.stage, of.micro_batch]
        make, number = (frames.reload if is_reload else frames.offload), of.micro_batch
        return lambda: make(number, frame)


def _whole(make: Callable[[], Move]) -> Call:
    def call() -> None:
        move = make()
        move.copy()
        move.end()

    return call


def _nothing() -> None:
    """Move nothing: the stage has no optimizer."""
