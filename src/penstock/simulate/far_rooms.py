"""Far rooms: the bytes of far memory that every rank comes to have; on a GPU the host pins them.

What a stage keeps of a micro-batch takes a room that is free, or a new one; state and weights have
one of their own.  None is given back, so a rank comes to have as many as it ever needs at once,
each rounded up to pages.

Ignores:  that blocks of a room begin at cache lines.
"""

import mmap

import numpy as np

from penstock.program.codes import BEGIN_OFFLOAD, COST_ROW, OFFLOAD, RELOAD
from penstock.program.program import Program
from penstock.schedule.orders import F
from penstock.simulate.costs import Memory, with_copies


def far_bytes(program: Program, memory: Memory) -> tuple[int, ...]:
    """Return the bytes of far memory of every rank of a program, which moves what `memory` says."""
    net = with_copies(memory.net_bytes)
    sizes = np.maximum(-net[COST_ROW[OFFLOAD]], net[COST_ROW[RELOAD]])  # [kind, stage]
    found: list[int] = []
    for rank in range(program.num_ranks):
        most = _rooms(program, rank)
        own = np.ones(program.num_stages)
        if memory.parts.size:
            own = memory.parts[rank]
        each = [
            int(sizes[kind, stage] * (1.0 if kind == F else own[stage])) for kind, stage in most
        ]
        pages = (-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in each)
        found.append(sum(size * count for size, count in zip(pages, most.values(), strict=True)))
    return tuple(found)


def _rooms(program: Program, rank: int) -> dict[tuple[int, int], int]:
    """Return by kind and stage how many rooms a rank needs at once."""
    codes, place = program.code, program.code.slice_of(rank)
    moves = np.isin(codes.op[place], (OFFLOAD, BEGIN_OFFLOAD, RELOAD))
    columns = codes.op, codes.kind, codes.stage, codes.micro_batch
    used, most = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    begun = set[tuple[int, int, int]]()
    rows = zip(*(each[place][moves].tolist() for each in columns), strict=True)
    for op, kind, stage, number in rows:
        key, move = (kind, stage), (kind, stage, number)
        if op == OFFLOAD and move in begun:  # its room was taken where it was begun
            begun.discard(move)
            continue
        if op == BEGIN_OFFLOAD:
            begun.add(move)
        if kind == F:
            used[key] = used.get(key, 0) + (-1 if op == RELOAD else 1)
        else:
            used[key] = 1
        most[key] = max(most.get(key, 0), used[key])
    return most
