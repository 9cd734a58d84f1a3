"""Issue: in which order a rank computes, sends and receives.

All ranks are run once on a clock on which everything takes one tick and messages take none, with
sends that never block.  What ends at a tick is written down then: the Compute, its Sends, and at
once, in the lists of the peers, their Receives.  A sum that an update waits for ends at one tick
for all of its members; another one takes no tick, for ranks go on while it runs.  So there is one
order of everything - by tick, then by rank, sums last - that all lists agree with, a
Send and its Receive being one event.  That is why a lowered program cannot stop, whatever its
sends do, and why messages between two ranks are received in the order in which they are sent.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import COMPUTE, RECEIVE, REDUCE, SEND, UPDATE
from penstock.program.loops import loop, part
from penstock.program.rules import Columns
from penstock.program.wiring import Laws, Wiring
from penstock.schedule.orders import B, F, I, U, W


class Turns(NamedTuple):
    """The orders of one pipeline, and what comes between their actions.

    Extra x of a rank, from `extra_offsets[rank]` on, comes before action `extra_at[x]` of the
    orders: a reduction (`extra_of`: which) or an Update (of which stage).  Where the orders list
    updates, a reduction stands before one and is waited for; else ranks go on, and wait at the end.
    """

    kinds: NDArray[np.uint8]
    stages: NDArray[np.int32]
    numbers: NDArray[np.int32]
    offsets: NDArray[np.int64]
    extra_at: NDArray[np.int64]
    extra_op: NDArray[np.int64]
    extra_of: NDArray[np.int64]
    extra_step: NDArray[np.int64]
    extra_offsets: NDArray[np.int64]
    waits: bool  # for each reduction where it stands


class Sources(NamedTuple):
    """What the loops read besides the orders."""

    where: NDArray[np.int32]  # [stage, micro-batch] -> rank
    wiring: Wiring
    laws: Laws
    members: NDArray[np.int32]  # ranks of this pipeline by reduction
    member_offsets: NDArray[np.int64]


class Clock(NamedTuple):
    """When each value is made and each sum is done, in ticks, and where each rank is."""

    made: NDArray[np.int32]  # [0: F, 1: B or I; stage, micro-batch] -> 2 * tick (+ 1: by I), or -1
    summed: NDArray[np.int64]  # extra -> tick
    time: NDArray[np.int64]  # rank -> the end of what it did last
    action: NDArray[np.int64]  # rank -> its next action
    extra: NDArray[np.int64]  # rank -> its next extra
    waits_for: NDArray[np.int64]  # rank -> flat index in `made`, or -1
    came: NDArray[np.int64]  # reduction -> ranks that wait in it
    latest: NDArray[np.int64]  # reduction -> when the last of them came
    ready: NDArray[np.int64]  # a stack of ranks that may go on, each at most once
    queued: NDArray[np.uint8]  # ranks on the stack


class Inbox(NamedTuple):
    """The messages to one rank, and room to sort them."""

    tick: NDArray[np.int64]
    peer: NDArray[np.int64]
    edge: NDArray[np.int64]
    micro_batch: NDArray[np.int64]
    by_i: NDArray[np.int64]  # 1: a B edge's value, made by I
    order: NDArray[np.int64]
    starts: NDArray[np.int64]  # tick -> its first place in `order`
    cursor: NDArray[np.int64]  # ROW, MESSAGE, MESSAGES


ROW, MESSAGE, MESSAGES = range(3)  # next row of the code, next message in order, their number


@loop
def run_clock(work: Turns, sources: Sources, clock: Clock) -> None:
    """Fill `clock.made` and `clock.summed`; a rank that waits forever leaves some extra undone."""
    top = len(clock.ready)
    while top > 0:
        top -= 1
        rank = clock.ready[top]
        clock.queued[rank] = 0
        while True:
            extra, index = int(clock.extra[rank]), int(clock.action[rank])
            if extra < work.extra_offsets[rank + 1] and work.extra_at[extra] == index:
                if work.extra_op[extra] == REDUCE and work.waits:
                    top = _join(rank, extra, work, sources, clock, top)
                    break
                clock.extra[rank] += 1
                clock.time[rank] += work.extra_op[extra] == UPDATE
                clock.summed[extra] = clock.time[rank]
                continue
            if index == work.offsets[rank + 1]:
                break
            if not _has_inputs(rank, index, work, sources, clock):
                break
            clock.action[rank] += 1
            clock.time[rank] += 1
            if work.kinds[index] < W:
                top = _make(rank, index, work, sources, clock, top)


@part
def _has_inputs(rank: int, index: int, work: Turns, sources: Sources, clock: Clock) -> bool:
    """Return whether all inputs of an action are made; if so, set the rank's time to the last."""
    kind, micro_batch, wiring = work.kinds[index], int(work.numbers[index]), sources.wiring
    if kind < W:
        later = kind != F
        key = 2 * int(work.stages[index]) + later
        num_stages, micro_batches = sources.where.shape
        for place in range(wiring.into_offsets[key], wiring.into_offsets[key + 1]):
            source = wiring.source[wiring.into[place]] + later * num_stages
            at = source * micro_batches + micro_batch
            if clock.made[at] < 0:
                clock.waits_for[rank] = at
                return False
            clock.time[rank] = max(clock.time[rank], clock.made[at] // 2)
    clock.waits_for[rank] = -1
    return True


@part
def _make(rank: int, index: int, work: Turns, sources: Sources, clock: Clock, top: int) -> int:
    """Record when F, B or I made its value; release the ranks that wait for it."""
    stage, micro_batch = int(work.stages[index]), int(work.numbers[index])
    later = work.kinds[index] != F
    num_stages, micro_batches = sources.where.shape
    at = (stage + later * num_stages) * micro_batches + micro_batch
    clock.made[at] = 2 * clock.time[rank] + (work.kinds[index] == I)
    wiring, key = sources.wiring, 2 * stage + later
    for place in range(wiring.out_of_offsets[key], wiring.out_of_offsets[key + 1]):
        peer = int(sources.where[wiring.target[wiring.out_of[place]], micro_batch])
        if clock.waits_for[peer] == at and not clock.queued[peer]:
            clock.ready[top] = peer
            clock.queued[peer] = 1
            top += 1
    return top


@part
def _join(rank: int, extra: int, work: Turns, sources: Sources, clock: Clock, top: int) -> int:
    """Let `rank` wait in a reduction; its last member lets all of them go on, at one tick."""
    one = work.extra_of[extra]
    clock.came[one] += 1
    clock.latest[one] = max(clock.latest[one], clock.time[rank] + 1)
    first, end = sources.member_offsets[one], sources.member_offsets[one + 1]
    if clock.came[one] == end - first:
        clock.came[one] = 0
        for place in range(first, end):
            member = int(sources.members[place])
            clock.summed[clock.extra[member]] = clock.time[member] = clock.latest[one]
            clock.extra[member] += 1
            clock.ready[top] = member
            clock.queued[member] = 1
            top += 1
    return top


@loop
def write_code(work: Turns, sources: Sources, clock: Clock, mail: Inbox, code: Columns) -> None:
    """Write the instructions of all ranks into `code`, slots left out."""
    num_ranks = len(work.offsets) - 1
    mail.cursor[ROW] = 0
    for rank in range(num_ranks):
        mail.cursor[MESSAGE] = 0
        _gather_mail(rank, work, sources, clock, mail)
        _sort_mail(mail)
        time, extra = 0, int(work.extra_offsets[rank])
        for index in range(work.offsets[rank], work.offsets[rank + 1] + 1):
            while extra < work.extra_offsets[rank + 1] and work.extra_at[extra] == index:
                op, of = int(work.extra_op[extra]), int(work.extra_of[extra])
                time = int(clock.summed[extra])
                _write_mail(time, num_ranks, mail, sources.wiring, code)
                stage, edge = (-1, of) if op == REDUCE else (of, -1)
                kind = F if op == REDUCE else U
                _write(code, mail, (op, kind, stage, int(work.extra_step[extra]), edge, -1, 0))
                extra += 1
            if index < work.offsets[rank + 1]:
                time = _tick_of(index, time, work, sources, clock)
                _write_mail(time, rank, mail, sources.wiring, code)
                _write_action(rank, index, work, sources, mail, code)


@part
def _gather_mail(rank: int, work: Turns, sources: Sources, clock: Clock, mail: Inbox) -> None:
    """Fill `mail` with all that `rank` receives, in the order of use."""
    wiring, where = sources.wiring, sources.where
    num_stages, micro_batches = where.shape
    count = 0
    for index in range(work.offsets[rank], work.offsets[rank + 1]):
        kind, micro_batch = work.kinds[index], int(work.numbers[index])
        if kind < W:
            later = kind != F
            key = 2 * int(work.stages[index]) + later
            for place in range(wiring.into_offsets[key], wiring.into_offsets[key + 1]):
                edge = wiring.into[place]
                source = int(wiring.source[edge])
                if where[source, micro_batch] != rank:
                    made = clock.made[(source + later * num_stages) * micro_batches + micro_batch]
                    mail.tick[count], mail.by_i[count] = made // 2, made % 2
                    mail.peer[count], mail.edge[count] = where[source, micro_batch], edge
                    mail.micro_batch[count] = micro_batch
                    count += 1
    mail.cursor[MESSAGES] = count


@part
def _sort_mail(mail: Inbox) -> None:
    """Sort the messages by tick, peer and edge: many by counting ticks first, all by insertion."""
    count = mail.cursor[MESSAGES]
    for message in range(count):
        mail.order[message] = message
    if count > 32:
        low, high = mail.tick[0], mail.tick[0]
        for message in range(count):
            low, high = min(low, mail.tick[message]), max(high, mail.tick[message])
        mail.starts[: high - low + 2] = 0
        for message in range(count):
            mail.starts[mail.tick[message] - low + 1] += 1
        for tick in range(high - low):
            mail.starts[tick + 1] += mail.starts[tick]
        for message in range(count):
            tick = mail.tick[message] - low
            mail.order[mail.starts[tick]] = message
            mail.starts[tick] += 1
    for place in range(1, count):
        at = place
        while at > 0 and _comes_before(mail.order[at], mail.order[at - 1], mail):
            mail.order[at], mail.order[at - 1] = mail.order[at - 1], mail.order[at]
            at -= 1


@part
def _comes_before(a: int, b: int, mail: Inbox) -> bool:
    if mail.tick[a] != mail.tick[b]:
        return mail.tick[a] < mail.tick[b]
    if mail.peer[a] != mail.peer[b]:
        return mail.peer[a] < mail.peer[b]
    return mail.edge[a] < mail.edge[b]


@part
def _tick_of(index: int, time: int, work: Turns, sources: Sources, clock: Clock) -> int:
    """Return when an action ends; what waits for nobody ends one tick after what is before it."""
    kind = work.kinds[index]
    if kind >= W:
        return time + 1
    num_stages, micro_batches = sources.where.shape
    stage = int(work.stages[index]) + (kind != F) * num_stages
    return int(clock.made[stage * micro_batches + work.numbers[index]] // 2)


@part
def _write_mail(tick: int, rank: int, mail: Inbox, wiring: Wiring, code: Columns) -> None:
    """Write the Receives of all messages that come before (tick, rank)."""
    while mail.cursor[MESSAGE] < mail.cursor[MESSAGES]:
        message = mail.order[mail.cursor[MESSAGE]]
        peer, edge = int(mail.peer[message]), int(mail.edge[message])
        if mail.tick[message] > tick or (mail.tick[message] == tick and peer > rank):
            break
        source = int(wiring.source[edge])
        kind = F if source < wiring.target[edge] else (I if mail.by_i[message] else B)
        micro_batch = int(mail.micro_batch[message])
        _write(code, mail, (RECEIVE, kind, source, micro_batch, edge, peer, 0))
        mail.cursor[MESSAGE] += 1


@part
def _write_action(
    rank: int, index: int, work: Turns, sources: Sources, mail: Inbox, code: Columns
) -> None:
    """Write a Compute and its Sends, or an Update."""
    kind, stage = work.kinds[index], int(work.stages[index])
    micro_batch = int(work.numbers[index])
    if kind == U:
        _write(code, mail, (UPDATE, U, stage, micro_batch, -1, -1, 0))
        return
    law = sources.laws.forward if kind == F else sources.laws.backward
    version = law[min(stage, law.shape[0] - 1), micro_batch]
    _write(code, mail, (COMPUTE, kind, stage, micro_batch, -1, -1, version))
    if kind < W:
        key, wiring = 2 * stage + (kind != F), sources.wiring
        for place in range(wiring.out_of_offsets[key], wiring.out_of_offsets[key + 1]):
            edge = wiring.out_of[place]
            peer = int(sources.where[wiring.target[edge], micro_batch])
            if peer != rank:
                _write(code, mail, (SEND, kind, stage, micro_batch, edge, peer, 0))


@part
def _write(code: Columns, mail: Inbox, row: tuple[int, int, int, int, int, int, int]) -> None:
    at = mail.cursor[ROW]
    mail.cursor[ROW] = at + 1
    code.op[at], code.kind[at], code.stage[at], code.micro_batch[at] = (
        row[0],
        row[1],
        row[2],
        row[3],
    )
    code.edge[at], code.peer[at], code.version[at] = row[4], row[5], row[6]
    code.slot[at] = -1
