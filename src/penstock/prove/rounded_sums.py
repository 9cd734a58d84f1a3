"""Rounded sums: what a step means whose gradients travel in 16 bits where ranks sum them.

    of each rank    the sum of the gradients of its micro-batches, rounded to 16 bits
    of all          the sum of these in float32, in the order of the ranks, rounded to 16 bits

of a parameter whose stage is on several ranks.  One that stages of a replica share is summed over
them first.  No messages, and not one line of narrow_sums.py: proofs compare runs with this.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.graph import Graph
from penstock.graph.parts import key_in, part_in
from penstock.graph.stages import Stages
from penstock.program.program import Compute, Program
from penstock.state.tensor_parts import whole


class RoundedSums:
    """Adds up the gradients of one step after the other.

    owners:  of each parameter that is summed over several ranks, or of each of its slices, by place
             of the micro-batch in its step: the number of the rank that adds its gradient.
    """

    def __init__(self, owners: Mapping[str, Sequence[int]], dtype: str) -> None:
        self.owners, self.dtype = owners, getattr(torch, dtype)
        self.slices: defaultdict[str, list[str]] = defaultdict(list)
        for name in owners:
            self.slices[key_in(name)].append(name)
        self.parts: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, place: int, gradient: Tensor) -> bool:
        """Add the gradient of a micro-batch; return whether ranks sum those of the parameter."""
        if name not in self.slices:
            return False
        for own, piece in _pieces(self.slices[name], gradient):
            parts, rank = self.parts.setdefault(own, {}), self.owners[own][place]
            parts[rank] = parts[rank] + piece if rank in parts else piece.clone()
        return True

    def take(self) -> dict[str, Tensor]:
        """Return the sums of all that was added, and begin again."""
        found: dict[str, Tensor] = {}
        for name, parts in self.parts.items():
            narrow = [parts[rank].to(self.dtype) for rank in sorted(parts)]
            total = narrow[0].float()
            for part in narrow[1:]:
                total = total + part.float()
            found[name] = total.to(self.dtype).float()
        self.parts = {}
        return whole(found)


def _pieces(names: Sequence[str], gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield a gradient by the names of its slices; whole where it has none."""
    starts = sorted((part.start, name) for name in names if (part := part_in(name)) is not None)
    if not starts:
        yield names[0], gradient
    ends = (*(start for start, _ in starts[1:]), gradient.numel())
    for (start, name), end in zip(starts, ends, strict=False):
        yield name, gradient.reshape(-1)[start:end]


def owners_of(program: Program, stages: Stages, graph: Graph) -> dict[str, list[int]]:
    """Return the owners of the gradients of a program, as `RoundedSums` needs them."""
    grid = program.grid
    adds: dict[int, dict[int, int]] = {stage.index: {} for stage in stages.stages}
    for rank in range(program.num_ranks):
        for instruction in program.code[rank]:
            if isinstance(instruction, Compute) and instruction.action.kind in "BW":
                for member in program.group_of(instruction.action):
                    step, place = grid.in_step(grid.replica_of(rank), member)
                    if step == 0:
                        adds[instruction.action.stage][place] = rank
    held = {node: (stage.index,) for stage in stages.stages for node in stage.parameters}
    held |= {node: holders for node, holders in stages.tied if len(holders) > 1}
    found: dict[str, list[int]] = {}
    for node, holders in held.items():
        ranks = adds[holders[0]]
        owners = [ranks[place] for place in sorted(ranks)]
        if len(holders) > 1:
            owners = [grid.replica_of(rank) for rank in owners]
        if any(len(set(adds[stage].values())) > 1 for stage in holders):
            found[graph.nodes[node].name] = owners
    return found
