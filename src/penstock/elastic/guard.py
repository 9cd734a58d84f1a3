"""Guard: one rank holds a copy of what another one alone has, and keeps it as new as that is.

State that lives on one rank only - a stage of a pipeline without replicas, a part of a divided
one - would be lost with it.  So each rank has a guard: the next one.  Before the word of a step
goes around, it sends its summed gradients there; when the word is through, the guard makes the same
update of its copy as the rank makes of the original, by the same numbers, so both are equal to the
bit.  A step then counts only when the gradients are in two places, and no step is lost with a rank.

A step costs the bytes of these gradients, once over the line to the next rank, and an update of
them; the copy takes memory: weights, state of the optimizer, gradients.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, cast, final

import torch
from torch import Tensor

from penstock.elastic.moving import receiver, sender
from penstock.graph.cut_points import written_buffers
from penstock.program.program import Program
from penstock.runtime.checkpoint import Checkpoint
from penstock.runtime.rank import Rank
from penstock.runtime.shards import Sharers
from penstock.runtime.transport import Transport
from penstock.runtime.weights import StageWeights

_EDGE = 2**21  # no program has so many, nor are they those of moving


def alone(program: Program) -> list[tuple[int, ...]]:
    """Return by rank the stages of which it holds what no other rank does."""
    stages = [set(program.stages_of(rank)) for rank in range(program.num_ranks)]
    count = {s: sum(s in own for own in stages) for s in range(program.num_stages)}
    divided = program.sharded if program.replicas > 1 else frozenset[int]()
    return [tuple(sorted(s for s in own if count[s] == 1 or s in divided)) for own in stages]


class _AsRank(NamedTuple):
    """A transport as another rank sees it; nothing is sent by it."""

    rank: int
    num_ranks: int


@final
class Guard:
    """What a rank keeps of the one before it, and sends to the one after it.

    weights:  by stage, the copies.
    """

    def __init__(self, rank: Rank, program: Program) -> None:
        own, count = alone(program), program.num_ranks
        ward = (rank.rank - 1) % count
        self.rank, self.weights = rank, dict[int, StageWeights]()
        for stage in own[ward]:
            self.weights[stage] = self._copy_of(ward, stage)
        rank.optimizers.release()
        self._written = written_buffers(rank.capture.graph)
        mine = [(rank.weights[stage], stage) for stage in own[rank.rank]]
        self._mine = [value for weights, _ in mine for value in self._told(weights)]
        self._staged: list[tuple[Tensor, Tensor]] = []  # buffers, and what they will be
        self._theirs = [value for weights in self.weights.values() for value in self._take(weights)]
        out, into = (sum(value.nbytes for value in each) for each in (self._mine, self._theirs))
        self._give = sender(rank.transport, _EDGE, (rank.rank + 1) % count, out)
        self._take_in = receiver(rank.transport, _EDGE, ward, into)

    def _copy_of(self, ward: int, stage: int) -> StageWeights:
        rank, sharers = self.rank, None
        if stage in rank.sharded:
            ranks = tuple(rank.grid.column_of(ward))
            parts = tuple(rank.parts[r] if rank.parts else 1 for r in ranks)
            seen = cast(Transport, _AsRank(ward, rank.transport.num_ranks))
            sharers = Sharers(seen, ranks, parts, rank.job, is_far=False)
        made = StageWeights(
            rank.stages.stages[stage],
            rank.capture,
            rank.job,
            has_gradients=rank.stages.has_gradients,
            optimizers=rank.optimizers,
            sharers=sharers,
        )
        made.use_gradients([p for p, holders in rank.stages.tied if stage in holders])
        return made

    def _told(self, weights: StageWeights) -> list[Tensor]:
        """Return what is sent of a stage: summed gradients, and the buffers that forward writes."""
        buffers = [value for n, value in sorted(weights.buffers.items()) if n in self._written]
        return [*weights.summed(), *buffers]

    def _take(self, weights: StageWeights) -> list[Tensor]:
        """Return where what is sent of a stage is put."""
        buffers = [value for n, value in sorted(weights.buffers.items()) if n in self._written]
        staged = [(value, torch.empty_like(value)) for value in buffers]
        self._staged += staged
        return [*weights.summed(), *(room for _, room in staged)]

    def load(self, state: Checkpoint) -> None:
        """Fill the copies with the state of a step."""
        for weights in self.weights.values():
            weights.load(state.tensors, state.plain)

    def exchange(self) -> None:
        """Send the gradients of this step to the next rank, and take those of the one before.

        Raises:   TransportError: one of them is lost.
        """
        for weights in self.weights.values():
            if weights.shard is not None:
                weights.shard.keep()
        for _ in zip_longest(self._give(self._mine), self._take_in(self._theirs)):
            pass  # piece by piece, so that none waits for room

    def update(self, step: int) -> None:
        """Make the update of a step of the run, which counts, of the copies too."""
        scale = self.rank.loss_scale
        for weights in self.weights.values():
            if scale is None or not scale.leaves_out(step):
                weights.step(step)
            if weights.shard is not None:
                weights.shard.forget()
        for value, staged in self._staged:
            value.copy_(staged)


def copy_bytes(program: Program, kept: Sequence[int], state_per_byte: float) -> list[int]:
    """Return by rank the bytes of the copy that it keeps of the one before it.

    kept:            bytes of the trainable weights of each stage.
    state_per_byte:  bytes of the optimizer's state per byte of weights.
    Weights and state of the stages that the rank before holds alone, and their gradients; of a
    divided stage its part.  Ignores: buffers, padding.
    """
    own, found = alone(program), list[int]()
    for rank in range(program.num_ranks):
        ward = (rank - 1) % program.num_ranks
        size = 0.0
        for stage in own[ward] if program.num_ranks > 1 else ():
            among = program.replicas if stage in program.sharded else 1
            size += kept[stage] / among * (2 + state_per_byte)
        found.append(int(size))
    return found
