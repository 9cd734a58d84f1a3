"""Collect: what ranks made in parts of a value is collected right behind the action that made it.

    before   F0.0               F1.0
    after    F0.0 sum:F0.0e0r0,1 F1.0

Keeps:   all other instructions, in their order.
Costs:   what reads it waits until all ranks of the tensor axis have come there.
"""

from collections.abc import Sequence

from penstock.program.codes import Codes
from penstock.program.edges import Edge
from penstock.program.instructions import Collect, Compute, Instruction
from penstock.schedule.grid import Grid


def with_collects(codes: Codes, edges: Sequence[Edge], grid: Grid) -> Codes:
    """Return `codes` with the Collects that the edges ask for."""
    asked: dict[tuple[bool, int], list[tuple[int, Edge]]] = {}
    for number, edge in enumerate(edges):
        if edge.collects:
            asked.setdefault((edge.kind == "F", edge.source), []).append((number, edge))
    if not asked:
        return codes
    made: list[list[Instruction]] = []
    for rank, code in enumerate(codes):
        own, ranks = list[Instruction](), grid.tensor_group(rank)
        for instruction in code:
            own.append(instruction)
            if isinstance(instruction, Compute) and instruction.action.kind != "W":
                kind, stage, _ = action = instruction.action
                for number, edge in asked.get((kind == "F", stage), ()):
                    own += [Collect(action, number, ranks, each.how) for each in edge.collects]
        made.append(own)
    return Codes.of(made)
