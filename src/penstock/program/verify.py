"""Verify: is this program complete, and does every rank have what it needs when it needs it?

The rules are V1-V9, as far as the present instructions need them:

    V1 complete     each stage runs F, then B or I and W, on every micro-batch, or all run only F
    V2 deadlock     no rank waits forever: rendezvous, bounded or unbounded sends
    V3 channels     messages of one rank to another are received in the order in which they are sent
    V4 both ends    agree on the value, the edge, the peers and the slot
    V6 slots        hold their value from the Receive to the last use: B or W, never I
    V7 versions     are those that the weight rule says, and there; gathered, where sharded
    V8 gradients    enter one update each, after every sum: tied stages, replicas, norm
                    (the sums of a step begin after the stage's update of the step before)
    V9 collectives  come in the same order on all of their members
    V10 collects    of what ranks made in parts, each once, before its first use

What a rank holds is the simulator's to say.  All are linear in the length of the program.
"""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from penstock.program import rules
from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COLLECT,
    COMPUTE,
    JOINS,
    OFFLOAD,
    REDUCE,
    RELOAD,
    RESHARD,
    UNSHARD,
    Codes,
)
from penstock.program.deadlock import stops
from penstock.program.faults import broken_rule, deadlock, missing, mixed_up, too_many
from penstock.program.instructions import COLLECT_HOWS
from penstock.program.needed import Holders, as_arrays, holders_of, needed, stages_by_rank
from penstock.program.rules import Collects, Columns, Facts, Known, Places, Sizes
from penstock.program.wiring import laws, wire
from penstock.schedule.orders import IntArray

if TYPE_CHECKING:  # a program verifies itself, so its file imports this one
    from penstock.program.program import Program


def verify(program: "Program") -> None:
    """Check that `program` is sound.

    Raises:   ProgramError: it is not; the first instruction that breaks a rule, and those around.
    """
    code, facts = columns(program.code), facts_of(program)
    finding = rules.follow(code, facts, _fresh(facts, program.num_ranks))
    if finding[0] != rules.FINE:
        raise broken_rule(program, finding)
    _check_collectives(program, facts)
    stopped = stops(code, facts)
    if (stopped != program.code.offsets[1:]).any():
        raise deadlock(program, facts, stopped)


def facts_of(program: "Program") -> Facts:
    """Return what the walks over `program` compare its instructions with.

    Raises:   ProgramError: an operand is out of range; an action is missing, doubled, misplaced.
    """
    sizes = _sizes_of(program)
    places = _places_of(program, sizes)
    shape = (program.replicas, sizes.stages, sizes.micro_batches)
    holders = _with_idle(program, holders_of(places.where.reshape(shape)))
    backward = int(places.done[0]) > rules.FORWARD_ONLY
    delays = any(one.word == "delayed" for one in program.code.reductions)
    ends, grid = (program.graph, program.end), program.grid
    made = needed(holders, *ends, sharded=program.sharded, delays=delays, grid=grid)
    reductions = made if backward else ()
    number_of = {one.reduction: number for number, one in enumerate(reductions)}
    held, held_offsets = stages_by_rank(holders, program.num_ranks)
    return Facts(
        sizes,
        places,
        wire(program.num_stages, program.edges),
        laws(program.weight_rule, program.num_stages, program.num_micro_batches, program.num_steps),
        as_arrays(reductions, program.num_stages, program.replicas),
        np.array([number_of.get(reduce, -1) for reduce in program.code.reductions], np.int64),
        held,
        held_offsets,
        backward,
        _collected_of(program),
    )


def _collected_of(program: "Program") -> Collects:
    """Return what ranks collect; a meeting of other ranks than divide a stage has no first."""
    bit = {how: 1 << at for at, how in enumerate(COLLECT_HOWS)}
    due = [sum(bit[each.how] for each in edge.collects) for edge in program.edges]
    grid, meetings = program.grid, program.code.meetings
    known = range(program.num_ranks)
    firsts = [
        ranks[0] if ranks[0] in known and ranks == grid.tensor_group(ranks[0]) else -1
        for ranks, _ in meetings
    ]
    bits = [bit[how] for _, how in meetings]
    known = [np.array(row, np.int64) for row in (due, bits, firsts)]
    return Collects(known[0], known[1], known[2], program.tensor)


def _with_idle(program: "Program", holders: Holders) -> Holders:
    """Return `holders` with the ranks that compute nothing, and update what others compute."""
    busy = np.add.reduceat(np.append(program.code.op == COMPUTE, False), program.code.offsets[:-1])
    idle = np.flatnonzero(busy == 0).tolist()
    if not any(program.stages_of(rank) for rank in idle):
        return holders
    rows = [[{*ranks} for ranks in replica] for replica in holders]
    for rank in idle:
        for stage in program.stages_of(rank):
            rows[program.grid.replica_of(rank)][stage].add(rank)
    return tuple(tuple(tuple(sorted(ranks)) for ranks in replica) for replica in rows)


def columns(code: Codes) -> Columns:
    """Return the columns of `code` as the loops take them."""
    small = (code.edge, code.peer, code.version, code.slot)
    return Columns(code.op, code.kind, code.stage, code.micro_batch, *small, code.offsets)


def _sizes_of(program: "Program") -> Sizes:
    return Sizes(
        program.num_stages,
        program.num_micro_batches * program.num_steps,
        program.num_steps,
        len(program.edges),
        len(program.code.reductions),
        *program.grid.places(),
        bool(np.isin(program.code.op, (UNSHARD, RESHARD)).any()),
        bool(np.isin(program.code.op, (OFFLOAD, RELOAD, BEGIN_OFFLOAD, BEGIN_RELOAD)).any()),
        program.together,
    )


def _places_of(program: "Program", sizes: Sizes) -> Places:
    num_actions = program.replicas * sizes.stages * sizes.micro_batches
    num_messages = program.replicas * sizes.edges * sizes.micro_batches
    where, done = np.full(num_actions, -1, np.int32), np.zeros(num_actions, np.uint8)
    places = Places(where, done, np.full(num_messages, -1, np.int32))
    finding = rules.place(columns(program.code), sizes, places)
    if finding[0] == rules.FINE:
        whole = (done == rules.WHOLE) | (done == rules.SPLIT)
        complete = whole if (done > rules.FORWARD_ONLY).any() else done == rules.FORWARD_ONLY
        shares = np.array(program.grid.shares)[:, None, None]
        shape = (program.replicas, sizes.stages, sizes.micro_batches)
        own = np.arange(sizes.micro_batches) % program.num_micro_batches < shares
        own = np.broadcast_to(own, shape).ravel()
        if not (complete | ~own).all():
            at = int(np.argmin(complete | ~own))
            raise missing(program, at, int(done[at]))
        if done[~own].any():
            raise too_many(program, int(np.argmax(~own & (done > 0))))
    if finding[0] != rules.FINE:
        raise broken_rule(program, finding)
    return places


def _fresh(facts: Facts, num_ranks: int) -> Known:
    sizes = facts.sizes
    return Known(
        now=np.zeros(len(facts.places.done), np.uint8),
        posted=np.zeros(len(facts.places.send_at), np.uint8),
        collected=np.zeros(len(facts.places.send_at), np.uint8),
        taken=np.zeros(sizes.edges * sizes.micro_batches, np.uint8),
        here=np.full(sizes.stages, -1, np.int64),
        updates=np.zeros(sizes.stages, np.int64),
        closed=np.zeros(sizes.stages, np.int64),
        summed=np.zeros(rules.NUM_HOWS * sizes.stages, np.int64),
        gathered=np.zeros(sizes.stages, np.int8),
        away=np.zeros(2 * sizes.stages, np.int8),
        next_step=np.zeros(len(facts.sums.hows), np.int64),
        stepper=np.full(len(facts.sums.hows), -1, np.int64),
        last_send=np.zeros(num_ranks, np.int64),
        hearer=np.full(num_ranks, -1, np.int64),
    )


def _check_collectives(program: "Program", facts: Facts) -> None:
    """Find a group of ranks that do not reach their collectives in the same order."""
    code = program.code
    if not code.reductions and not code.meetings and not facts.sizes.sharding:
        return
    joins = JOINS[code.op] & ((code.op != UNSHARD) | (program.replicas > 1))
    rows = np.flatnonzero(joins | (code.op == COLLECT))
    bounds = np.searchsorted(rows, code.offsets)
    named = code.op, code.edge, code.stage, code.micro_batch, code.kind, code.slot
    keys: list[tuple[int, ...]] = list(
        zip(*(column[rows].tolist() for column in named), strict=True)
    )
    first: dict[tuple[int, ...], tuple[int, list[int]]] = {}  # by group, of its first rank
    for rank, (start, end) in enumerate(pairwise(bounds.tolist())):
        column = tuple(program.grid.column_of(rank))
        own: dict[tuple[int, ...], list[int]] = {}
        for at in range(start, end):
            op, edge, *_, slot = keys[at]
            group = code.reductions[edge].ranks if op == REDUCE else column
            group = code.meetings[slot].ranks if op == COLLECT else group
            own.setdefault(group, []).append(at)
        for group in {column, *own}:
            mine = own.get(group, [])
            other, order = first.setdefault(group, (rank, mine))
            if [keys[at] for at in order] != [keys[at] for at in mine]:
                words = [_words(code, rows[each]) for each in (order, mine)]
                raise mixed_up(group, (other, words[0]), (rank, words[1]))


def _words(code: Codes, rows: IntArray) -> list[str]:
    return [str(each) for row in rows.tolist() for each in code.between(slice(row, row + 1))]
