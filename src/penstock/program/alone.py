"""Alone: what one rank holds and no other does, and would be lost with it."""

from penstock.program.program import Program


def alone(program: Program) -> list[tuple[int, ...]]:
    """Return by rank the stages of which it holds what no other rank does."""
    stages = [set(program.stages_of(rank)) for rank in range(program.num_ranks)]
    count = {s: sum(s in own for own in stages) for s in range(program.num_stages)}
    divided = program.sharded if program.replicas > 1 else frozenset[int]()
    return [tuple(sorted(s for s in own if count[s] == 1 or s in divided)) for own in stages]
