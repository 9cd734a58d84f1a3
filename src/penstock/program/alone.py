"""Alone: what one rank holds and no other does, and would be lost with it."""

from collections.abc import Sequence

from penstock.program.program import Program


def alone(program: Program) -> list[tuple[int, ...]]:
    """Return by rank the stages of which it holds what no other rank does."""
    stages = [set(program.stages_of(rank)) for rank in range(program.num_ranks)]
    count = {s: sum(s in own for own in stages) for s in range(program.num_stages)}
    divided = program.sharded if program.replicas > 1 else frozenset[int]()
    return [tuple(sorted(s for s in own if count[s] == 1 or s in divided)) for own in stages]


def guarded(program: Program, shared: Sequence[int]) -> list[tuple[int, ...]]:
    """Return by rank the stages that its guard keeps a copy of: those that the rank has alone.

    shared:  stages of several ranks that are kept, too; the first of those ranks gives them.
    """
    stages = [program.stages_of(rank) for rank in range(program.num_ranks)]
    first = {
        stage: next(rank for rank, own in enumerate(stages) if stage in own) for stage in shared
    }
    given = [
        {stage for stage, giver in first.items() if giver == rank} for rank in range(len(stages))
    ]
    return [tuple(sorted({*own, *more})) for own, more in zip(alone(program), given, strict=True)]


def fewest_holders(program: Program) -> int:
    """Return how many ranks have to be lost at least for state to be lost: guards keep it, too."""
    count = [0] * program.num_stages
    for rank in range(program.num_ranks):
        for stage in program.stages_of(rank):
            count[stage] += 1
    for own in alone(program):
        for stage in own:
            count[stage] = 1
    guard = program.end.guard
    shared = () if guard is None else guard.shared
    kept = {*shared, *(s for own in alone(program) for s in own if guard is not None)}
    return min(number + (stage in kept) for stage, number in enumerate(count))
