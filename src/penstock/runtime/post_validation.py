"""Post-validation: updates before the norm of all gradients is known, taken back where wrong.

    end of a step     every rank updates at once, and sends its norms to one rank, the hub, which
                      holds the last stage
    next step         forwards go on, with the new weights
    first backward    before it the hub adds up the norms and sends them to all; the others wait for
                      them before theirs, which come after the hub's anyway

Where the gradients have to be clipped, a rank takes its updates back, clips, updates again, and
does the forwards again that it has done since (program/provisional.py says which these are).
Weights, losses and buffers are those of clipping before the update, bit for bit.  The next updates
then wait for the norm, until one comes that clips nothing: clipping at every step costs what it
costs without post-validation.

Source: Zero Bubble, arXiv:2401.10241, section 4.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.device import of
from penstock.program.program import Program
from penstock.program.provisional import provisional_ends, sent_until
from penstock.program.reductions import Validate
from penstock.runtime.calls import Bound
from penstock.runtime.end_of_step import GlobalNorm, LocalStages
from penstock.transport.transport import TensorSpec

if TYPE_CHECKING:
    from penstock.runtime.rank import Rank

_Channel = tuple[int, int]  # an edge and a peer


class Validation:
    """What a rank does about the norm of a program that validates its updates.

    settle:  lets the rank know it, as Rank.settle; where that changes the weights, what was done
             since then has to be done again.
    """

    def __init__(
        self, rank: "Rank", program: Program, validate: Validate, own: LocalStages
    ) -> None:
        self.rank, self.norm, self.step = rank, GlobalNorm(rank, own), validate.step
        self.updated = [rank.weights_of(stage) for stage in own.stages]
        for weights in self.updated:
            weights.remember_updates()
        last = program.num_stages - 1
        hub = next(r for r in validate.ranks if last in program.stages_of(r))
        self.exchange = _Exchange(rank, self.norm.count, hub, validate.ranks)
        self.is_clipped = False  # already, before the update

    def before_updates(self) -> None:
        """Clip at once, where the step before had to be clipped too."""
        self.is_clipped = self.rank.expects_clipping
        if self.is_clipped:
            self.exchange.tell(self.norm.own())
            self.rank.expect_clipping(self.norm.clip(self.exchange.learn(), self._number()))
        for weights in self.updated:
            weights.may_undo(not self.is_clipped)

    def after_updates(self) -> None:
        """Tell this rank's part of the norm."""
        if not self.is_clipped:
            self.exchange.tell(self.norm.own())
            self.rank.unsettled.append(partial(self._decide, self._number()))

    def _number(self) -> int:
        return self.rank.progress.first_step + self.step

    def _decide(self, number: int) -> bool:
        """Learn the norm of a step of the run; update again if it clips; return whether it does."""
        clips = self.rank.expect_clipping(self.norm.clip(self.exchange.learn(), number))
        for weights in self.updated if clips else ():
            weights.update_again()
        return clips


class _Exchange:
    """The norms of all parameters, told by each rank and known to all: over one of them, the hub.

    They travel on two edges behind those of the stages.
    """

    def __init__(self, rank: "Rank", count: int, hub: int, ranks: Sequence[int]) -> None:
        specs, edge = (TensorSpec((count,), torch.float64),), len(rank.stages.edges)
        others = [peer for peer in ranks if peer != rank.rank]
        if rank.rank != hub:
            others = [hub]
        way, back = (edge + 1, edge) if rank.rank == hub else (edge, edge + 1)
        bind_send, bind_receive = rank.transport.bind_send, rank.transport.bind_receive
        self.is_hub = rank.rank == hub
        self.sends = [bind_send(way, peer, specs, ahead=1) for peer in others]
        self.receives = [bind_receive(back, peer, specs, ahead=1) for peer in others]
        self.kept: Tensor | None = None  # the hub's own norms

    def tell(self, norms: Tensor) -> None:
        """Give the norms of this rank's parameters, zeros for all others; it does not wait."""
        if self.is_hub:
            self.kept = norms
        else:
            self.sends[0]([norms])
        for post, _ in self.receives:
            if post is not None:
                post()

    def learn(self) -> Tensor:
        """Return the norms of all parameters; every rank calls it, and waits for the hub."""
        came = [wait()[0] for _, wait in self.receives]
        if not self.is_hub:
            return came[0]
        total, self.kept = self.kept, None
        assert total is not None, "it was told before"
        for norms in came:  # each number is zero on all ranks but one: the order is of no matter
            total += norms
        for send in self.sends:
            send([total])
        return total


class Provisional:
    """What a rank does of a window before it knows whether the update before it stands.

    ends:  as `known_before` returns them.
    done:  the calls so far.  It is asked to `begin` before them, and to `settle` behind them.
    """

    def __init__(
        self, rank: "Rank", program: Program, ends: NDArray[np.int64], done: Sequence[Bound]
    ) -> None:
        self.rank, self.done = rank, [bound for bound in done if bound.lane != "data"]
        written = rank.capture.graph.written
        held = (rank.weights_of(stage).buffers for stage in program.stages_of(rank.rank))
        self.buffers = [value for some in held for node, value in some.items() if node in written]
        self.before: list[Tensor] = []
        self.losses = [b.micro_batch for b in done if _makes_loss(rank, b)]
        ways = sent_until(program, ends).items()
        self.sent = {(edge, peer): n for (edge, peer, to), n in ways if to == rank.rank}
        self.again: list[Bound] = []
        self.drains: list[Callable[[], object]] = []

    def close(self, all_calls: Sequence[Bound]) -> None:
        """Note the messages that are under way when the rank settles; `all_calls` of the window."""
        taken, posted = (_count(self.done, lane) for lane in ("take", "post"))
        left = {way: count - taken[way] for way, count in self.sent.items()}
        for bound in all_calls:
            way = _channel(bound)
            if bound.lane == "take" and taken[way] > 0:
                taken[way] -= 1
            elif bound.lane == "take" and left.get(way, 0) > 0:
                left[way] -= 1
                self.drains.append(self.rank.receiver(*way)[1])
        kept = {way: count - self.sent.get(way, 0) for way, count in posted.items()}
        for bound in self.done:
            if bound.lane == "post" and kept.get(_channel(bound), 0) > 0:
                kept[_channel(bound)] -= 1  # it is still posted
            else:
                self.again.append(bound)

    def begin(self) -> None:
        """Keep what forwards change."""
        if self.rank.unsettled:
            self.before = [buffer.clone() for buffer in self.buffers]

    def settle(self) -> None:
        """Settle the last update; where it is another one now, do the forwards again."""
        if not self.rank.unsettled:
            return
        if self.rank.settle():
            self._do_again()
        elif self.rank.is_guarded and not of(self.rank.device).is_queued:
            for micro_batch, loss in zip(self.losses, self.rank.progress.losses[0], strict=True):
                if not isfinite(loss.item()):
                    self.rank.check_loss(float(loss), micro_batch)
        self.before = []
        self.rank.read.clear()

    def _do_again(self) -> None:
        rank = self.rank
        for drain in self.drains:
            drain()
        for frame in rank.frames.values():
            frame.clear()
        rank.outbox.clear()
        rank.progress.losses.pop(0, None)
        rank.progress.figures.pop(0, None)
        for buffer, value in zip(self.buffers, self.before, strict=True):
            buffer.copy_(value)
        rank.batches.update(rank.read)
        for bound in self.again:
            bound.call()


def known_before(rank: "Rank", program: Program) -> NDArray[np.int64]:
    """Return the row of each rank before which it has to know whether the last update stands.

    That is where it can no longer do again what it has done; the first one where copies of a stage
    exchange parts of its buffers, and over NCCL, which gives messages in the order sent, whatever
    their edge.
    """
    if rank.carries or of(rank.device).is_queued:
        return program.code.offsets[:-1].astype(np.int64)
    return provisional_ends(program)


def _makes_loss(rank: "Rank", bound: Bound) -> bool:
    stages, loss = rank.stages.stages, rank.capture.graph.loss
    return bound.lane == "compute" and loss in stages[bound.stage].forward.ops


def _count(calls: Sequence[Bound], lane: str) -> Counter[_Channel]:
    return Counter(_channel(bound) for bound in calls if bound.lane == lane)


def _channel(bound: Bound) -> _Channel:
    return (bound.edge, bound.ranks[0]) if bound.edge >= 0 else (-1, -1)
