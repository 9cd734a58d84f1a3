"""Prefetch: gather the weights of a stage while an earlier compute is still running.

    before   Compute(F0.0)  Unshard(1)     Compute(F1.0)
    after    Unshard(1)     Compute(F0.0)  Compute(F1.0)

Keeps:   the instructions of every rank, only their order changes; the order of the
         Unshards and Reduces among themselves, so no gather delays another one.
Gains:   up to `distance` computes of time to hide each gather in.
Costs:   at most `distance` more unsharded stages in memory at any moment.
Source:  arXiv:2304.11277 (forward and backward prefetching).
"""

from penstock.program.program import (
    Code,
    Compute,
    Instruction,
    Program,
    Receive,
    Reduce,
    Reshard,
    Send,
    Unshard,
    Update,
)


def prefetch(program: Program, *, distance: int = 1) -> Program:
    """Return `program` with every Unshard issued up to `distance` computes earlier.

    Raises:   ValueError: `distance` is negative.
    """
    if distance < 0:
        raise ValueError(f"distance is {distance} computes; it must be 0 (no prefetch) or more")
    return program.map_ranks(lambda code: _prefetch(code, distance))


def _prefetch(code: Code, distance: int) -> Code:
    moved: list[Instruction] = []
    for instruction in code:
        at = len(moved)
        if isinstance(instruction, Unshard):
            at = _earliest(moved, instruction.stage, distance)
        moved.insert(at, instruction)
    return tuple(moved)


def _earliest(code: list[Instruction], stage: int, distance: int) -> int:
    """Return the index before the `distance`-th last compute, or as near as may be."""
    earliest, computes = len(code), 0
    for at in range(len(code) - 1, -1, -1):
        if computes == distance:
            break
        match code[at]:
            case Compute():
                earliest, computes = at, computes + 1
            case Unshard() | Reduce():  # collectives stay in order
                break
            case Reshard(other) if other == stage:  # its old copy is still in use
                break
            case Update(other) if other == stage:  # it would gather old weights
                break
            case Reshard() | Update() | Send() | Receive():
                pass
    return earliest
