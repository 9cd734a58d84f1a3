"""Matched: which span of a timeline is which instruction of its program.

A measured timeline shows what the computing threads did, Sends included: a thread is in a Send
until the message is handed over.  A simulated one shows messages on the wire.  Both show
collectives on lanes of their own.  Both are matched by rank, lane,
kind, stage and micro-batch; spans alike in all of these, as messages of one action are,
in the order in which they stand, which is that of the code.
"""

from collections import defaultdict, deque
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.errors import TimelineError
from penstock.program.codes import COMPUTE, JOINS, REDUCE, SEND, SHOWN, SPAN_OF, WORKS, begun
from penstock.program.instructions import TABLE
from penstock.program.program import Program
from penstock.program.wiring import wire
from penstock.schedule.orders import F, W
from penstock.timeline.spans import LANES
from penstock.timeline.timeline import Timeline

Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Key: TypeAlias = tuple[int, int, int, int, int]  # rank, lane, kind, stage, micro-batch

_HINT = "is it the timeline of a run of this plan?"


class Matched(NamedTuple):
    """By row of the program's code: start and end of its span; nan where it has none.

    All seconds count from the first start of any span.
    """

    starts_s: Floats
    ends_s: Floats
    is_measured: bool


def match(program: Program, timeline: Timeline) -> Matched:
    """Return the span of every instruction; messages of a simulation may have none.

    Raises:   TimelineError: it is not a timeline of this program: other ranks, an instruction
              without a span, a span without an instruction, actions in another order.
    """
    if timeline.num_ranks != program.num_ranks:
        message = f"a timeline of {timeline.num_ranks} ranks for a program of {program.num_ranks}"
        raise TimelineError(message, hint=_HINT)
    waiting = _by_key(timeline)
    starts_s, ends_s = np.full((2, program.code.num_instructions), np.nan)
    spans, is_measured = timeline.spans, dict(timeline.meta).get("clock") == "measured"
    optional = ("receive",) if is_measured else ("send", "receive")
    for rank in range(program.num_ranks):
        for row, key in _keys(program, rank):
            if waiting[key]:
                at = waiting[key].popleft()
                starts_s[row], ends_s[row] = spans.starts_s[at], spans.ends_s[at]
            elif LANES[key[1]] not in optional:
                name = program.code.between(slice(row, row + 1))[0]
                raise TimelineError(f"rank {rank} of the timeline lacks {name}", hint=_HINT)
    for left in waiting.values():
        if left:
            span = spans[left[0]]
            what = f"{span.name} on rank {span.rank}, which the program does not do"
            raise TimelineError(f"the timeline shows {what}", hint=_HINT)
    _check_order(program, starts_s)
    zero_s = float(spans.starts_s.min()) if len(spans) else 0.0
    return Matched(starts_s - zero_s, ends_s - zero_s, is_measured)


def _check_order(program: Program, starts_s: Floats) -> None:
    """Raise unless the actions of every rank begin in the order of the code."""
    code = program.code
    rows = np.flatnonzero(WORKS[code.op] & ~begun(code))
    owners = np.searchsorted(code.offsets, rows, side="right")
    wrong = (np.diff(starts_s[rows]) < 0) & (np.diff(owners) == 0)
    for at in np.flatnonzero(wrong)[:1].tolist():
        names = [code.between(slice(row, row + 1))[0] for row in (int(rows[at]), int(rows[at + 1]))]
        what = f"{names[1]} before {names[0]} on rank {owners[at] - 1}, the program after it"
        raise TimelineError(f"the timeline does {what}", hint=_HINT)


def _by_key(timeline: Timeline) -> defaultdict[Key, deque[int]]:
    """Return the places of all spans of each key, as they stand."""
    spans = timeline.spans
    found: defaultdict[Key, deque[int]] = defaultdict(deque)
    columns = spans.ranks, spans.lanes, spans.kinds, spans.stages, spans.micro_batches
    for at, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        rank, lane, kind, stage, micro_batch = key
        found[rank, lane, kind, stage, micro_batch].append(at)
    return found


def _keys(program: Program, rank: int) -> list[tuple[int, Key]]:
    """Return row and key of every instruction of a rank that a timeline may show."""
    code, part = program.code, program.code.slice_of(rank)
    lanes = [LANES.index(row.lane or "compute") for row in TABLE]
    found: list[tuple[int, Key]] = []
    for row in (np.flatnonzero(SHOWN[code.op[part]]) + part.start).tolist():
        op, where = int(code.op[row]), (int(code.stage[row]), int(code.micro_batch[row]))
        found.append((row, (rank, lanes[op], int(SPAN_OF[op, code.kind[row]]), *where)))
    return found


def sends_read(program: Program) -> dict[int, tuple[int, ...]]:
    """Return for the row of each compute that is the first to use messages the rows of the Sends.

    That is F, B or I: W uses what I has used.
    """
    code, wiring = program.code, wire(program.num_stages, program.edges)
    owners = np.repeat(np.arange(program.num_ranks), np.diff(code.offsets))
    replicas: list[int] = program.grid.places()[0][owners].tolist()
    sends = {
        (replicas[row], int(code.edge[row]), int(code.micro_batch[row])): row
        for row in np.flatnonzero(code.op == SEND).tolist()
    }
    found: dict[int, tuple[int, ...]] = {}
    for row in np.flatnonzero((code.op == COMPUTE) & (code.kind != W)).tolist():
        side = 2 * int(code.stage[row]) + int(code.kind[row] != F)
        edges = wiring.into[wiring.into_offsets[side] : wiring.into_offsets[side + 1]].tolist()
        keys = ((replicas[row], edge, int(code.micro_batch[row])) for edge in edges)
        if own := tuple(sends[key] for key in keys if key in sends):
            found[row] = own
    return found


def members(program: Program) -> dict[int, list[int]]:
    """Return for each collective's row the rows of all its members."""
    code = program.code
    groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    counts: defaultdict[tuple[int, int], int] = defaultdict(int)
    for row in np.flatnonzero(JOINS[code.op]).tolist():
        if code.op[row] == REDUCE:
            groups[0, int(code.edge[row]), int(code.micro_batch[row])].append(row)
        else:
            rank, stage = code.rank_at(row), int(code.stage[row])
            counts[rank, stage] += 1
            groups[1, program.grid.column_of(rank)[0], stage, counts[rank, stage]].append(row)
    return {row: rows for rows in groups.values() for row in rows}


def awaited_first(program: Program) -> dict[int, int]:
    """Return for each sum in shards the one before it of its rank, which its thread awaits."""
    code, found = program.code, dict[int, int]()
    names = np.array([one.word == "shards" for one in code.reductions], np.bool_)
    rows = np.flatnonzero(code.op == REDUCE)
    rows = rows[names[code.edge[rows]]] if len(names) else rows
    owners = np.searchsorted(code.offsets, rows, side="right")
    for before, row, alike in zip(rows, rows[1:], owners[1:] == owners[:-1], strict=False):
        if alike:
            found[int(row)] = int(before)
    return found
