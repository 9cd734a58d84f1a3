"""Rules: the loops that look for the first instruction that breaks one; faults.py has the words.

Three walks over the columns, each linear in the length of the program:

    place    V1  what is computed where; what is sent where
    follow   V3-V4, V6-V8  one rank after the other, in its own order: values and weights are there
             when they are used, slots are free when they are filled, gradients are whole
    (deadlock.py)  V2  all ranks together
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COLLECT,
    COMPUTE,
    OF_KIND,
    OFFLOAD,
    RECEIVE,
    REDUCE,
    RELOAD,
    RESHARD,
    SEND,
    UNSHARD,
    UPDATE,
    USES_EDGE,
    USES_NUMBER,
    USES_PEER,
    USES_STAGE,
    Numbers,
)
from penstock.program.loops import loop, part
from penstock.program.needed import NeededSums
from penstock.program.wiring import Laws, Wiring
from penstock.schedule.orders import B, F, I, U, W

(
    FINE,
    OUT_OF_RANGE,
    TWICE,
    ELSEWHERE,
    NOT_ITS_TURN,
    SENT_TWICE,
    MISSING,
    NOT_MADE_YET,
    NOT_POSTED_YET,
    WRONG_VERSION,
    VERSION_NOT_THERE,
    STILL_SHARDED,
    TOO_LATE_FOR_SUM,
    NOT_THE_EDGE,
    NOTHING_TO_SEND,
    WRONG_PEER,
    NEVER_SENT,
    RECEIVED_TWICE,
    POSTED_TOO_LATE,
    OTHER_SLOT,
    OVERTAKEN,
    SLOT_IN_USE,
    UNKNOWN_SUM,
    SUM_OUT_OF_STEP,
    SUM_TOO_EARLY,
    SUM_TOO_LATE,
    NOT_THIS_STAGE,
    UPDATE_OUT_OF_STEP,
    NOT_SUMMED,
    GATHERED_AT_UPDATE,
    GATHERED_TWICE,
    DROPPED_TWICE,
    NOT_UPDATED,
    NOT_VALIDATED,
    NOT_DROPPED,
    IS_AWAY,
    NOT_AWAY,
    NOTHING_THERE,
    NOT_VALIDATED_YET,
    NOT_BACK,
    NOT_FIRST,
    IS_COPIED,
    NOT_APART,
    IS_NEAR,
    NOT_COLLECTED,
    COLLECTED_TWICE,
    NOT_THIS_COLLECT,
    NOT_THIS_GROUP,
    NOT_AVERAGED,
) = range(49)
NUM_HOWS, DELAYED, SHARDS, VALIDATE, AVERAGE = 9, 0, 3, 7, 8  # of reductions.WORDS

Finding: TypeAlias = tuple[
    int, int, int
]  # rule, row (or -1), and the number that the rule's message needs


class Columns(NamedTuple):
    """The columns of `Codes`, as the loops take them."""

    op: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    stage: Numbers
    micro_batch: NDArray[np.int32]
    edge: Numbers
    peer: Numbers
    version: Numbers
    slot: Numbers
    offsets: NDArray[np.int64]


class Sizes(NamedTuple):
    """How many of each there are.  Micro-batches count over the whole window."""

    stages: int
    micro_batches: int
    steps: int
    edges: int
    reductions: int
    replica: NDArray[np.int64]  # of each rank
    column: NDArray[np.int64]  # of each rank: its place in its replica
    sharding: bool  # the program has an Unshard or a Reshard
    copying: bool  # it has an Offload or a Reload
    together: int  # micro-batches of a B or W


class Places(NamedTuple):
    """Where things are, by (replica, stage, micro-batch) and (replica, edge, micro-batch)."""

    where: NDArray[np.int32]  # rank
    done: NDArray[np.uint8]  # bit 1 << kind for each kind of action that there is
    send_at: NDArray[np.int32]  # row of the Send


class Known(NamedTuple):
    """What `follow` knows at one instruction; values by stage are of the current rank."""

    now: NDArray[np.uint8]  # as Places.done, up to here
    posted: NDArray[np.uint8]  # messages
    collected: NDArray[np.uint8]  # messages: bits of what was collected of them, on this rank
    taken: NDArray[np.uint8]  # slots by (edge, slot)
    here: NDArray[np.int64]  # stage -> the last rank that was found to hold it
    updates: NDArray[np.int64]  # stage -> updates so far
    closed: NDArray[np.int64]  # stage -> steps whose gradient was summed already
    summed: NDArray[np.int64]  # NUM_HOWS * stage + how -> reductions of the current step so far
    gathered: NDArray[np.int8]  # stage -> 0 never sharded, 1 sharded, 2 gathered
    away: NDArray[np.int8]  # stage -> AWAY where its optimizer state is far, plus the other bits;
    # stages + stage -> likewise for its weights
    next_step: NDArray[np.int64]  # reduction -> its next step
    stepper: NDArray[np.int64]  # reduction -> rank to which next_step belongs
    last_send: NDArray[np.int64]  # sender -> row of the last Send received from it
    hearer: NDArray[np.int64]  # sender -> rank to which last_send belongs


class Collects(NamedTuple):
    """What ranks collect, and which of them together."""

    due: NDArray[np.int64]  # edge -> bits of what ranks collect of it
    meeting_bit: NDArray[np.int64]  # meeting -> its bit
    meeting_first: NDArray[np.int64]  # meeting -> the first of its ranks, or -1
    tensor: int  # ranks of a meeting


class Facts(NamedTuple):
    """All that `follow` compares the instructions with."""

    sizes: Sizes
    places: Places
    wiring: Wiring
    laws: Laws
    sums: NeededSums
    sum_of: NDArray[np.int64]  # place in Codes.reductions -> in the needed reductions, or -1
    held: NDArray[np.int64]  # stages by rank
    held_offsets: NDArray[np.int64]
    backward: bool  # there are gradients
    collects: Collects


FORWARD_ONLY, WHOLE, SPLIT = 1 << F, 1 << F | 1 << B, 1 << F | 1 << I | 1 << W
BACKWARD = 1 << B | 1 << I  # what makes the values of B edges
PENDING, GATHERED = 1, 2
AWAY, BEGAN_AWAY = 1, 2
COPYING = 4  # a copy of it is under way
KEPT_AWAY = 1 << 7  # of Known.now: what F keeps for the backward is far
KEPT_COPYING = 1 << 6  # of Known.now: a copy of it is under way


@loop
def place(code: Columns, sizes: Sizes, places: Places) -> Finding:
    """Fill `places`; find operands out of range, actions done twice, and messages sent twice."""
    for rank in range(len(code.offsets) - 1):
        replica = sizes.replica[rank]
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            if not _in_range(code, sizes, row):
                return OUT_OF_RANGE, row, -1
            op, micro_batch = code.op[row], code.micro_batch[row]
            if op == COMPUTE:
                at = (replica * sizes.stages + code.stage[row]) * sizes.micro_batches + micro_batch
                count = _group(code.kind[row], sizes)
                if micro_batch % count:
                    return NOT_FIRST, row, count
                for member in range(at, at + count):
                    rule, other = _place_action(code.kind[row], member, rank, places)
                    if rule != FINE:
                        return rule, row, other
            elif op == SEND:
                message = (
                    replica * sizes.edges + code.edge[row]
                ) * sizes.micro_batches + micro_batch
                if places.send_at[message] >= 0:
                    return SENT_TWICE, row, int(places.send_at[message])
                places.send_at[message] = row
    return FINE, -1, -1


@part
def _in_range(code: Columns, sizes: Sizes, row: int) -> bool:
    op, kind = code.op[row], code.kind[row]
    if op >= len(OF_KIND) or kind > U or not OF_KIND[op, kind]:
        return False
    if USES_EDGE[op]:
        edges = sizes.reductions if op == REDUCE else sizes.edges
        if not 0 <= code.edge[row] < edges:
            return False
    if USES_PEER[op]:
        if not 0 <= code.slot[row] < sizes.micro_batches:
            return False
        if not 0 <= code.peer[row] < len(code.offsets) - 1:
            return False
    if USES_NUMBER[op]:
        numbers = sizes.steps if op == REDUCE or kind == U else sizes.micro_batches
        if not 0 <= code.micro_batch[row] < numbers:
            return False
    return not USES_STAGE[op] or 0 <= code.stage[row] < sizes.stages


@part
def _group(kind: int, sizes: Sizes) -> int:
    """Return how many micro-batches an action of a kind is of, from its own on."""
    return sizes.together if kind in (B, W) else 1


@part
def _place_action(kind: int, at: int, rank: int, places: Places) -> tuple[int, int]:
    done = places.done[at]
    if done & (1 << kind):
        return TWICE, int(places.where[at])
    if done != 0 and places.where[at] != rank:
        return ELSEWHERE, int(places.where[at])
    before = 0 if kind == F else (1 << F | 1 << I if kind == W else 1 << F)
    if done != before:
        return NOT_ITS_TURN, int(done)
    places.done[at] = done | (1 << kind)
    places.where[at] = rank
    return FINE, -1


@loop
def follow(code: Columns, facts: Facts, state: Known) -> Finding:
    """Find the first instruction that its own rank is not ready for."""
    sizes = facts.sizes
    for rank in range(len(code.offsets) - 1):
        held = facts.held[facts.held_offsets[rank] : facts.held_offsets[rank + 1]]
        _arrive(code, rank, held, facts.sizes, state)
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            op = code.op[row]
            if op == COMPUTE:
                rule, other = _compute(code, row, rank, facts, state)
            elif op == SEND:
                rule, other = _send(code, row, rank, facts, state)
            elif op == RECEIVE:
                rule, other = _receive(code, row, rank, facts, state)
            elif op == COLLECT:
                rule, other = _collect(code, row, rank, facts, state)
            elif op == REDUCE:
                rule, other = _reduce(code, row, rank, facts, state)
            elif op == UPDATE or op == UNSHARD or op == RESHARD:  # noqa: SIM109 - `in` is a loop
                rule, other = _weights(code, row, rank, facts, state)
            elif sizes.copying and op in (OFFLOAD, RELOAD, BEGIN_OFFLOAD, BEGIN_RELOAD):
                rule, other = _copy(code, row, rank, facts, state)
            else:  # it can stand anywhere
                rule, other = FINE, -1
            if rule != FINE:
                return rule, row, other
        for stage in held:
            if facts.backward and state.updates[stage] < facts.sizes.steps:
                return NOT_UPDATED, rank, stage
            validated = state.summed[NUM_HOWS * stage + VALIDATE]
            if facts.sums.needs[NUM_HOWS * stage + VALIDATE] and validated < facts.sizes.steps:
                return NOT_VALIDATED, rank, stage
            averaged = state.summed[NUM_HOWS * stage + AVERAGE]
            if facts.sums.needs[NUM_HOWS * stage + AVERAGE] and averaged < facts.sizes.steps:
                return NOT_AVERAGED, rank, stage
            if state.gathered[stage] == GATHERED:
                return NOT_DROPPED, rank, stage
            for what in (stage, facts.sizes.stages + stage):
                if state.away[what] in (AWAY, BEGAN_AWAY) or state.away[what] & COPYING:
                    return NOT_BACK, rank, what
    return FINE, -1, -1


@part
def _arrive(code: Columns, rank: int, held: NDArray[np.int64], sizes: Sizes, state: Known) -> None:
    for stage in held:
        state.here[stage] = rank
        state.updates[stage] = state.closed[stage] = 0
        state.summed[NUM_HOWS * stage : NUM_HOWS * (stage + 1)] = 0
        state.gathered[stage] = state.away[stage] = state.away[sizes.stages + stage] = 0
    if sizes.sharding:
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            if code.op[row] == UNSHARD or code.op[row] == RESHARD:
                state.gathered[code.stage[row]] = PENDING
    if sizes.copying:
        for row in range(code.offsets[rank + 1] - 1, code.offsets[rank] - 1, -1):
            what = code.stage[row] + (0 if code.kind[row] == U else sizes.stages)
            if code.kind[row] != F and code.op[row] == RELOAD:  # the first one counts
                state.away[what] = AWAY | BEGAN_AWAY
            elif code.kind[row] != F and code.op[row] == OFFLOAD:
                state.away[what] = 0


@part
def _compute(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    sizes = facts.sizes
    kind, stage, micro_batch = code.kind[row], int(code.stage[row]), code.micro_batch[row]
    replica = sizes.replica[rank]
    if kind != W:
        rule, edge = _inputs(kind, stage, micro_batch, rank, facts, state)
        if rule != FINE:
            return rule, edge
    law = facts.laws.forward if kind == F else facts.laws.backward
    version = law[min(stage, law.shape[0] - 1), micro_batch]
    if code.version[row] != version:
        return WRONG_VERSION, int(version)
    if not -facts.laws.history[stage] <= version <= state.updates[stage]:
        return VERSION_NOT_THERE, int(state.updates[stage])
    if state.gathered[stage] == PENDING:
        return STILL_SHARDED, -1
    if kind in (B, W):
        step = micro_batch // (sizes.micro_batches // sizes.steps)
        if step < state.closed[stage]:
            return TOO_LATE_FOR_SUM, step
    at = (replica * sizes.stages + stage) * sizes.micro_batches + micro_batch
    for member in range(_group(kind, sizes)):
        if law[min(stage, law.shape[0] - 1), micro_batch + member] != version:
            return WRONG_VERSION, int(version)
        if state.now[at + member] & KEPT_AWAY:
            return IS_AWAY, -1
        if state.now[at + member] & KEPT_COPYING:
            return IS_COPIED, -1
        state.now[at + member] |= 1 << kind
        if kind in (B, W) or not facts.backward:
            _free_slots(code, stage, micro_batch + member, rank, facts, state)
    return FINE, -1


@part
def _inputs(
    kind: int, stage: int, micro_batch: int, rank: int, facts: Facts, state: Known
) -> tuple[int, int]:
    """Find an input of F, B or I that is not there: not made yet here, or no receive posted."""
    sizes, wiring = facts.sizes, facts.wiring
    key = 2 * stage + (kind != F)
    replica = sizes.replica[rank]
    for place_in_list in range(wiring.into_offsets[key], wiring.into_offsets[key + 1]):
        edge = wiring.into[place_in_list]
        source = (replica * sizes.stages + wiring.source[edge]) * sizes.micro_batches + micro_batch
        if facts.places.where[source] == rank:
            if not state.now[source] & (1 << F if kind == F else BACKWARD):
                return NOT_MADE_YET, edge
            message = (replica * sizes.edges + edge) * sizes.micro_batches + micro_batch
            if state.collected[message] != facts.collects.due[edge]:
                return NOT_COLLECTED, edge
        elif not state.posted[(replica * sizes.edges + edge) * sizes.micro_batches + micro_batch]:
            return NOT_POSTED_YET, edge
    return FINE, -1


@part
def _free_slots(
    code: Columns, stage: int, micro_batch: int, rank: int, facts: Facts, state: Known
) -> None:
    sizes, wiring = facts.sizes, facts.wiring
    replica = sizes.replica[rank]
    for place_in_list in range(wiring.into_offsets[2 * stage], wiring.into_offsets[2 * stage + 2]):
        edge = wiring.into[place_in_list]
        message = (replica * sizes.edges + edge) * sizes.micro_batches + micro_batch
        if state.posted[message]:
            slot = code.slot[facts.places.send_at[message]]
            state.taken[edge * sizes.micro_batches + slot] = 0


@part
def _ends(code: Columns, row: int, rank: int, facts: Facts) -> tuple[int, int, int]:
    """Return where a message's value is made and used, and its number; or -1 -1 -1."""
    sizes, wiring = facts.sizes, facts.wiring
    replica = sizes.replica[rank]
    edge, micro_batch = int(code.edge[row]), code.micro_batch[row]
    source, target = wiring.source[edge], wiring.target[edge]
    if (
        source != code.stage[row]
        or (source < target) != (code.kind[row] == F)
        or code.kind[row] == W
    ):
        return -1, -1, -1
    made = (replica * sizes.stages + source) * sizes.micro_batches + micro_batch
    used = (replica * sizes.stages + target) * sizes.micro_batches + micro_batch
    return made, used, (replica * sizes.edges + edge) * sizes.micro_batches + micro_batch


@part
def _send(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    made, used, _ = _ends(code, row, rank, facts)
    where = facts.places.where
    if made < 0:
        return NOT_THE_EDGE, -1
    if code.micro_batch[row] % _group(code.kind[row], facts.sizes):
        return NOTHING_TO_SEND, rank
    if where[made] != rank or not state.now[made] & (1 << code.kind[row]):
        return NOTHING_TO_SEND, int(where[made])
    if code.peer[row] != where[used] or where[used] == rank:
        return WRONG_PEER, int(where[used])
    return FINE, -1


@part
def _receive(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    made, used, message = _ends(code, row, rank, facts)
    where = facts.places.where
    if made < 0 or not facts.places.done[made] & (1 << code.kind[row]):
        return NOT_THE_EDGE, -1
    if where[used] != rank or code.peer[row] != where[made] or where[made] == rank:
        return WRONG_PEER, int(where[made])
    sent = facts.places.send_at[message]
    if sent < 0:
        return NEVER_SENT, -1
    if state.posted[message]:
        return RECEIVED_TWICE, -1
    if state.now[used] & (1 << F if code.kind[row] == F else BACKWARD):
        return POSTED_TOO_LATE, -1
    if code.slot[row] != code.slot[sent]:
        return OTHER_SLOT, int(sent)
    peer = code.peer[row]
    if state.hearer[peer] == rank and state.last_send[peer] > sent:
        return OVERTAKEN, int(state.last_send[peer])
    slot = code.edge[row] * facts.sizes.micro_batches + code.slot[row]
    if state.taken[slot]:
        return SLOT_IN_USE, -1
    state.posted[message] = state.taken[slot] = 1
    state.hearer[peer], state.last_send[peer] = rank, sent
    return FINE, -1


@part
def _collect(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    made, used, message = _ends(code, row, rank, facts)
    where, meeting = facts.places.where, int(code.slot[row])
    bit = facts.collects.meeting_bit[meeting]
    if made < 0:
        return NOT_THE_EDGE, -1
    if not facts.collects.due[code.edge[row]] & bit or where[used] != rank:
        return NOT_THIS_COLLECT, -1
    first = facts.collects.meeting_first[meeting]
    apart, replicas = len(facts.sizes.replica), facts.sizes.replica[-1] + 1
    if first < 0 or (rank - first) % (apart // replicas) or rank < first:
        return NOT_THIS_GROUP, -1
    if where[made] != rank or not state.now[made] & (1 << code.kind[row]):
        return NOTHING_TO_SEND, int(where[made])
    if state.collected[message] & bit:
        return COLLECTED_TWICE, -1
    state.collected[message] |= bit
    return FINE, -1


@part
def _reduce(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    sums, one, step = facts.sums, facts.sum_of[code.edge[row]], code.micro_batch[row]
    if one < 0:
        return UNKNOWN_SUM, -1
    ranks = sums.ranks[sums.rank_offsets[one] : sums.rank_offsets[one + 1]]
    found = np.searchsorted(ranks, rank)
    if found == len(ranks) or ranks[found] != rank:
        return UNKNOWN_SUM, -1
    next_step = state.next_step[one] if state.stepper[one] == rank else 0
    if next_step != step:
        return SUM_OUT_OF_STEP, int(next_step)
    state.stepper[one], state.next_step[one] = rank, step + 1
    how = sums.hows[one]
    for place_in_list in range(sums.stage_offsets[one], sums.stage_offsets[one + 1]):
        stage = sums.stages[place_in_list]
        if state.here[stage] == rank:
            if how >= VALIDATE:  # and what else comes after updates
                if state.updates[stage] != step + 1:
                    return SUM_OUT_OF_STEP, int(state.updates[stage])
                state.summed[NUM_HOWS * stage + how] = step + 1
                continue
            if state.updates[stage] != step:
                return SUM_OUT_OF_STEP, int(state.updates[stage])
            for other in range(VALIDATE):
                so_far = state.summed[NUM_HOWS * stage + other]
                if other < how and so_far != sums.needs[NUM_HOWS * stage + other]:
                    return SUM_TOO_EARLY, int(stage)
                if other > how and so_far > 0:
                    return SUM_TOO_LATE, int(stage)
            state.summed[NUM_HOWS * stage + how] += 1
            if how != DELAYED:  # which is of the step before
                state.closed[stage] = step + 1
    return FINE, -1


@part
def _weights(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    """Update, Unshard or Reshard."""
    op, stage = code.op[row], code.stage[row]
    if state.here[stage] != rank or (op == UPDATE and not facts.backward):
        return NOT_THIS_STAGE, -1
    part = state.away[facts.sizes.stages + stage]
    if op == UNSHARD:
        if part and part & (AWAY | COPYING) != AWAY:
            return IS_NEAR, -1
        rule = FINE if state.gathered[stage] == PENDING else GATHERED_TWICE
        state.gathered[stage] = GATHERED
        return rule, -1
    if op == RESHARD:
        rule = FINE if state.gathered[stage] == GATHERED else DROPPED_TWICE
        state.gathered[stage] = PENDING
        return rule, -1
    if code.micro_batch[row] != state.updates[stage]:
        return UPDATE_OUT_OF_STEP, int(state.updates[stage])
    if state.gathered[stage] == GATHERED:
        return GATHERED_AT_UPDATE, -1
    if (state.away[stage] | part) & AWAY:
        return IS_AWAY, -1
    if (state.away[stage] | part) & COPYING:
        return IS_COPIED, -1
    for how in range(VALIDATE):
        if state.summed[NUM_HOWS * stage + how] != facts.sums.needs[NUM_HOWS * stage + how]:
            return NOT_SUMMED, how
        state.summed[NUM_HOWS * stage + how] = 0
    state.updates[stage] += 1
    state.closed[stage] = max(state.closed[stage], state.updates[stage])
    return FINE, -1


@part
def _copy(code: Columns, row: int, rank: int, facts: Facts, state: Known) -> tuple[int, int]:
    """Offload or Reload, or what begins one."""
    sizes, stage, number = facts.sizes, int(code.stage[row]), code.micro_batch[row]
    op = code.op[row]
    is_reload, begins = op in (RELOAD, BEGIN_RELOAD), op in (BEGIN_OFFLOAD, BEGIN_RELOAD)
    if state.here[stage] != rank or not facts.backward:
        return NOT_THIS_STAGE, -1
    if code.kind[row] != F:
        return _copy_between_updates(code, row, facts, state, is_reload, begins)
    at = (sizes.replica[rank] * sizes.stages + stage) * sizes.micro_batches + number
    done = int(state.now[at]) & ~(KEPT_AWAY | KEPT_COPYING)
    if facts.places.where[at] != rank or done != 1 << F:
        return NOTHING_THERE, -1
    if begins and state.now[at] & KEPT_COPYING:
        return IS_COPIED, -1
    if bool(state.now[at] & KEPT_AWAY) != is_reload:
        return (NOT_AWAY if is_reload else IS_AWAY), -1
    if begins:
        state.now[at] |= KEPT_COPYING
    else:
        state.now[at] = (int(state.now[at]) ^ KEPT_AWAY) & ~KEPT_COPYING
    return FINE, -1


@part
def _copy_between_updates(
    code: Columns, row: int, facts: Facts, state: Known, is_reload: bool, begins: bool
) -> tuple[int, int]:
    """Of what updates leave: the optimizer's state, or weights, which come back with gradients."""
    stage, number, kind = int(code.stage[row]), code.micro_batch[row], code.kind[row]
    own = NUM_HOWS * stage
    if facts.sums.needs[own + VALIDATE]:
        return NOT_VALIDATED_YET, -1
    due = state.updates[stage] if is_reload else state.updates[stage] - 1
    if number != due:
        return UPDATE_OUT_OF_STEP, int(due)
    what = stage + (0 if kind == U else facts.sizes.stages)
    if kind == W:
        if not facts.sums.needs[own + SHARDS] or not state.away[what]:
            return NOT_APART, -1
        for how in range(VALIDATE if is_reload else 0):
            if state.summed[own + how] != facts.sums.needs[own + how]:
                return NOT_SUMMED, how
    if begins and state.away[what] & COPYING:
        return IS_COPIED, -1
    if bool(state.away[what] & AWAY) != is_reload:
        return (NOT_AWAY if is_reload else IS_AWAY), -1
    if begins:
        state.away[what] |= COPYING
    else:
        state.away[what] = (int(state.away[what]) ^ AWAY) & ~COPYING
    return FINE, -1
