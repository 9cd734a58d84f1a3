"""Rounded sums: what a step means whose gradients travel in 16 bits where ranks sum them.

    of each rank    the sum of the gradients of its micro-batches, rounded to 16 bits
    of all          the sum of these in float32, in the order of the ranks, rounded to 16 bits

of a parameter whose stage is on several ranks.  One that stages of a replica share is summed over
them first.  No messages, and not one line of narrow_sums.py: proofs compare runs with this.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.graph.graph import Graph
from penstock.graph.stages import Stages
from penstock.program.program import Compute, Program


class RoundedSums:
    """Adds up the gradients of one step after the other.

    owners:  of each parameter that is summed over several ranks, by place of the micro-batch in its
             step: the number of the rank that adds its gradient.
    """

    def __init__(self, owners: Mapping[str, Sequence[int]], dtype: str) -> None:
        self.owners, self.dtype = owners, getattr(torch, dtype)
        self.parts: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, place: int, gradient: Tensor) -> bool:
        """Add the gradient of a micro-batch; return whether ranks sum those of the parameter."""
        if name not in self.owners:
            return False
        parts, rank = self.parts.setdefault(name, {}), self.owners[name][place]
        parts[rank] = parts[rank] + gradient if rank in parts else gradient.clone()
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
        return found


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
