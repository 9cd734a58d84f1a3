"""Memory: the bytes that instructions take and free, and what every rank holds as a result.

    action             transient bytes while it runs, net bytes from then on
    message            from its Receive to the first use, where `Memory` has bytes for messages;
                       between two stages of one rank, from its making
    weights            from Unshard to Reshard
    whole gradients    of a stage in shards: from its first backward of a step until the next sum
                       in shards is begun, or until an update

The table of instructions says which of these one is (`Row.bytes`), `Memory` how many bytes that
are.  What the simulator, the search and a report know about held bytes comes from here.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from penstock.graph.stages import StageEdge
from penstock.program.codes import (
    BEGIN_RELOAD,
    COMPUTE,
    COST_ROW,
    JOINS,
    NUM_COSTS,
    REDUCE,
    RELOAD,
    UPDATE,
    WORKS,
    Numbers,
    begun,
)
from penstock.program.edges import Edge
from penstock.program.instructions import TABLE, Bytes
from penstock.program.program import Program
from penstock.program.reductions import Sum
from penstock.schedule.ledger import Changes, Levels, levels, peaks
from penstock.schedule.orders import B, F, I, IntArray, U, W
from penstock.schedule.schedule import Schedule
from penstock.simulate.costs import Memory, with_copies
from penstock.simulate.price import DeviceMemory
from penstock.timeline.spans import MemoryCurve

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]

_BYTES = get_args(Bytes)
_ACTION, _MESSAGE, _DROP = map(_BYTES.index, ("action", "message", "no weights"))
_HOLDS = np.array([_BYTES.index(row.bytes) for row in TABLE])  # by op


class Account(NamedTuple):
    """What the ranks of a program hold, by the instructions that change it."""

    rows: IntArray  # of the code
    offsets: IntArray  # of each rank's among `rows`
    start: IntArray
    held: Levels

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Return the bytes of every rank at its fullest."""
        return tuple(peaks(self.held, self.offsets, self.start).tolist())


def account(program: Program, memory: Memory) -> Account:
    """Return the bytes that every rank of `program` holds, instruction by instruction.

    Raises:   ValueError: `memory` is of other ranks, stages or edges.
    """
    _check(program, memory)
    codes, gathered = program.code, np.zeros(program.num_stages, np.int64)
    if len(memory.unsharded_bytes):
        gathered = memory.unsharded_bytes
    holds = _HOLDS if len(memory.message_bytes) else np.where(_HOLDS == _MESSAGE, 0, _HOLDS)
    shards = _shards(program) if memory.summed_bytes.size else np.zeros(0, np.int64)
    acts = holds[codes.op].astype(np.bool_)
    acts[shards] = True
    rows = np.flatnonzero(acts)
    offsets, start = np.searchsorted(rows, codes.offsets), memory.start_bytes
    op, kind, stage = codes.op[rows], codes.kind[rows], codes.stage[rows]
    dropped = NUM_COSTS + (holds == _DROP)
    freed = holds[op] == 0  # sums in shards: what they do is in _gradients
    at = np.where((holds == _ACTION)[:, None], COST_ROW, dropped[:, None])[op, kind], stage
    during = np.stack([*with_copies(memory.transient_bytes), gathered, -gathered])[at]
    after = np.stack([*with_copies(memory.net_bytes), gathered, -gathered])[at]
    during, after = _by_parts(program, memory, rows, (during, after))
    early = begun(codes)[rows] & (op == RELOAD)  # room was made where it was begun
    during[early | freed] = after[early | freed] = 0
    before = np.zeros(len(rows), np.int64)
    if len(shards):
        more, less, updated = _gradients(program, memory, rows)
        ended = np.where(op == COMPUTE, memory.summed_bytes[1][stage], 0)
        during = np.maximum(during, np.where(more > 0, ended + more, during))
        after += more - updated
        before -= less
    if len(memory.message_bytes):
        posted, uses = holds[op] == _MESSAGE, (op == COMPUTE) & (kind != W)
        edge, number = codes.edge[rows[posted]], codes.micro_batch[rows]
        during[posted] = after[posted] = memory.message_bytes[edge]
        replica = np.repeat(program.grid.places()[0], np.diff(offsets))
        taken = _taken(program, memory, (replica[posted], edge, number[posted]))
        side = (kind[uses] != F).astype(np.int64)
        before[uses] -= taken[replica[uses], stage[uses], side, number[uses]]
    if memory.waiting_bytes.any():
        made, used = _waiting(program, memory, rows)
        after += made
        before -= used
    return Account(rows, offsets, start, levels(Changes(before, during, after), offsets, start))


def _by_parts(
    program: Program, memory: Memory, rows: IntArray, sizes: tuple[IntArray, IntArray]
) -> tuple[IntArray, IntArray]:
    """Return the bytes of `rows`, of what ranks divide each times what its rank keeps of it."""
    if not memory.parts.size:
        return sizes
    codes, times = program.code, np.ones(len(rows))
    op, kind = codes.op[rows], codes.kind[rows]
    own = (_HOLDS[op] == _ACTION) & ((kind == U) | ((kind == W) & (op != COMPUTE)))
    owners = np.searchsorted(codes.offsets, rows[own], side="right") - 1
    times[own] = memory.parts[owners, codes.stage[rows[own]]]
    return (sizes[0] * times).astype(np.int64), (sizes[1] * times).astype(np.int64)


def _waiting(program: Program, memory: Memory, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Return by row the bytes made for other stages of its rank, and the bytes used of these."""
    codes = program.code
    ranks = np.repeat(np.arange(program.num_ranks), np.diff(np.searchsorted(rows, codes.offsets)))
    kind = np.where(codes.op[rows] == COMPUTE, codes.kind[rows], U).astype(np.int64)
    replica = program.grid.places()[0][ranks]
    actions = _OfReplicas(ranks, replica, kind, codes.stage[rows], codes.micro_batch[rows])
    return _inside(actions, program.edges, memory.waiting_bytes.tolist(), program.together)


class _OfReplicas(NamedTuple):
    """Actions: on which rank of which replica, and what."""

    ranks: IntArray
    replicas: IntArray | Ints
    kinds: IntArray
    stages: Numbers
    micro_batches: Numbers


def _inside(
    actions: _OfReplicas, edges: Sequence[Edge | StageEdge], sizes: Sequence[int], together: int
) -> tuple[IntArray, IntArray]:
    """Return by action the bytes made for other stages of its rank, and the bytes used of these.

    sizes:     by edge
    together:  as in a schedule
    """
    ranks, replicas, kinds, stages, micro_batches = actions
    computes = (kinds == F) | (kinds == B) | (kinds == I)
    first = kinds == F
    shape = [int(each.max(initial=-1)) + 1 for each in (replicas, stages, micro_batches)]
    where = np.full(shape, -1, np.int64)
    where[replicas[first], stages[first], micro_batches[first]] = ranks[first]
    held = np.zeros((2, 2, *shape), np.int64)  # made or used, by F or backward
    for edge, size in zip(edges, sizes, strict=True):
        here = (where[:, edge.source] == where[:, edge.target]) * size
        held[0, int(edge.kind == "B"), :, edge.source] += here
        held[1, int(edge.kind == "B"), :, edge.target] += here
    found = held[:, (~first).astype(np.int64), replicas, stages, micro_batches] * computes
    found *= np.where(kinds == B, together, 1)
    return found[0], found[1]


def _shards(program: Program) -> IntArray:
    """Return the rows of all sums that leave shards."""
    codes = program.code
    names = np.array([one.word == "shards" for one in codes.reductions], np.bool_)
    sums = np.flatnonzero(codes.op == REDUCE)
    return sums[names[codes.edge[sums]]] if len(names) else sums[:0]


def _gradients(
    program: Program, memory: Memory, rows: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Return by row the bytes taken for gradients of divided stages, and the bytes freed.

    The bytes freed are two figures: at the row's start and at its end.
    """
    codes, sharded, far = program.code, program.sharded, program.far
    more, less, updated = np.zeros((3, len(rows)), np.int64)
    sizes = {stage: int(memory.summed_bytes[0][stage]) for stage in sharded}
    kept = np.tile(memory.summed_bytes[2], (program.num_ranks, 1))
    if memory.parts.size:
        kept = (kept * memory.parts).astype(np.int64)
    ops, kinds, stages = codes.op[rows].tolist(), codes.kind[rows].tolist(), codes.stage[rows]
    owners = np.searchsorted(codes.offsets, rows, side="right").tolist()
    held, due, rank = dict[int, int](), 0, 0  # by stage; what is under way or summed
    for at, (op, kind, stage) in enumerate(zip(ops, kinds, stages.tolist(), strict=True)):
        if owners[at] != rank:
            held, due, rank = {}, 0, owners[at]
        if op == COMPUTE and kind in (B, W) and stage in sharded and stage not in held:
            held[stage] = more[at] = sizes[stage]
        elif op in (REDUCE, UPDATE) or (op in (RELOAD, BEGIN_RELOAD) and kind == W):
            less[at], due = due, 0
            if op == REDUCE:
                leaving = codes.reductions[int(codes.edge[rows[at]])]
                assert isinstance(leaving, Sum), "only sums leave shards"
                summed = leaving.stage
                stays = 0 if summed in far else kept[rank - 1, summed]
                more[at] = (0 if summed in held else sizes[summed]) + stays
                due = held.pop(summed, sizes[summed])
            elif op == UPDATE and stage in sharded:
                updated[at] = kept[rank - 1, stage]
    return more, less, updated


def _check(program: Program, memory: Memory) -> None:
    shape = len(memory.start_bytes), memory.net_bytes.shape[1]
    if shape != (program.num_ranks, program.num_stages):
        wanted = f"a program of {program.num_ranks} and {program.num_stages}"
        raise ValueError(f"memory of {shape[0]} ranks and {shape[1]} stages for {wanted}")
    for sizes in (memory.message_bytes, memory.waiting_bytes):
        if len(sizes) in (0, len(program.edges)):
            continue
        there = len(sizes)
        raise ValueError(f"memory of {there} edges for a program of {len(program.edges)}")


def _taken(program: Program, memory: Memory, posted: tuple[IntArray, Numbers, Ints]) -> IntArray:
    """Return the bytes of messages by first user: [replica, stage, F or other, micro-batch].

    `posted` are replica, edge and micro-batch of those that have a Receive.
    """
    window = program.num_micro_batches * program.num_steps
    sizes = np.zeros((program.replicas, len(program.edges), window), np.int64)
    sizes[posted] = memory.message_bytes[posted[1]]
    taken = np.zeros((program.replicas, program.num_stages, 2, window), np.int64)
    for number, edge in enumerate(program.edges):
        taken[:, edge.target, int(edge.kind == "B")] += sizes[:, number]
    return taken


def curve_of(program: Program, held: Account, work_s: Floats, issued_s: Floats) -> MemoryCurve:
    """Return the bytes that every rank holds over time, from 0 s.

    work_s    [all that works, 2]: start and end, as they stand in the code
    issued_s  of all collectives, likewise
    """
    codes, rows, offsets = program.code, held.rows, held.offsets
    known = np.flatnonzero(WORKS[codes.op] | JOINS[codes.op])
    works = WORKS[codes.op[known]]
    known_s = np.zeros(len(known) + 1)  # the last one stands for the time before any
    known_s[:-1][works], known_s[:-1][~works] = work_s[:, 1], issued_s
    _keep_order(known_s, np.searchsorted(known, codes.offsets))
    ranks = np.repeat(np.arange(program.num_ranks, dtype=np.int32), np.diff(offsets))
    last = np.searchsorted(known, rows, side="right") - 1
    last[last < np.searchsorted(known, codes.offsets)[ranks]] = -1
    acts = np.flatnonzero(WORKS[codes.op[rows]])
    # Each rank has an entry at 0 s, each row one as it ends, and what acts one as it begins.
    places = 3 * offsets[:-1], 3 * acts + 1, 3 * np.arange(len(rows)) + 2
    by_place = np.argsort(np.concatenate(places), kind="stable")
    owners = np.concatenate([np.arange(program.num_ranks, dtype=np.int32), ranks[acts], ranks])
    begun_s = np.where(begun(codes)[rows[acts]], known_s[last[acts]], work_s[:, 0])
    times_s = np.concatenate([np.zeros(program.num_ranks), begun_s, known_s[last]])
    sizes = np.concatenate([held.start, held.held.during[acts], held.held.after])
    return MemoryCurve(owners[by_place], times_s[by_place], sizes[by_place])


def _keep_order(known_s: Floats, offsets: IntArray) -> None:
    """Let nothing end before what its thread did earlier, as a copy beside it may."""
    for rank in range(len(offsets) - 1):
        part = known_s[offsets[rank] : offsets[rank + 1]]
        np.maximum.accumulate(part, out=part)


def most_held(
    schedule: Schedule, edges: Sequence[StageEdge], held: Sequence[DeviceMemory]
) -> IntArray:
    """Return the bytes of every rank of a replica at its fullest: [rank, kind of device].

    edges:    of the stages.
    Ignores:  messages that wait, and what a validated update keeps.
    """
    orders = schedule.orders
    kinds, stages, offsets = orders.kinds, orders.stages, orders.offsets
    ranks = np.repeat(np.arange(len(orders)), np.diff(offsets))
    actions = _OfReplicas(ranks, 0 * ranks, kinds.astype(np.int64), stages, orders.micro_batches)
    peaks_by_kind: list[IntArray] = []
    for each in held:
        start_bytes = np.array(each.start, np.int64)
        own = [np.unique(stages[orders.slice_of(rank)]) for rank in range(len(orders))]
        start = np.array([start_bytes[those].sum() for those in own], np.int64)
        made, used = _inside(actions, edges, each.waiting, schedule.together)
        net = each.net[kinds, stages] + made
        changes = Changes(-used, each.transient[kinds, stages], net)
        peaks_by_kind.append(peaks(levels(changes, offsets, start), offsets, start))
    return np.stack(peaks_by_kind, axis=1)
