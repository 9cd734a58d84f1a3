"""V2: run all ranks together, without work, and see which stop.

A Send blocks while `capacity` messages of its channel (sender, receiver) have no receive posted:
0 is rendezvous, None never blocks.  A Receive never blocks.  A Compute waits for the messages that
it uses; an Unshard, or a Collect, for all of its members.  A reduction runs on a lane of its rank,
which takes one after another, each when all of its members have come to it on theirs; a norm, an
Unshard, and what needs sums (an Update), wait until their rank's lane is empty.  Whatever order the
ranks run in, the same ranks stop at the same place, so one run decides.  A program that passes with
capacity 0 passes with every other one: a larger capacity only removes waits.

Ignores:  that sends, gathers and collects go on by themselves: what stops here might not.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import (
    COLLECT,
    COMPUTE,
    RECEIVE,
    REDUCE,
    SEND,
    UNSHARD,
    WAITS_FOR_SUMS,
)
from penstock.program.loops import loop, part
from penstock.program.needed import NeededSums
from penstock.program.rules import Columns, Facts, Sizes
from penstock.program.wiring import Wiring
from penstock.schedule.orders import F, W

SENT, POSTED = 1, 2
NORM = 4  # in reductions.WORDS; it and the next one have to be over before a rank goes on


class Traffic(NamedTuple):
    """What the ranks wait for."""

    messages: NDArray[np.uint8]  # SENT and POSTED bits
    waits_for: NDArray[np.int64]  # rank -> message, or -1
    arrived: NDArray[np.uint8]  # ranks that wait in a norm or an Unshard
    lanes: "SumLanes"
    at_gather: NDArray[np.int64]  # place in a replica -> ranks that wait in an Unshard
    at_collect: NDArray[np.int64]  # first rank of a group -> ranks that wait in its Collect
    row: NDArray[np.int64]  # rank -> where it is
    ready: NDArray[np.int64]  # a stack of ranks that may go on, each at most once
    queued: NDArray[np.uint8]  # ranks on the stack


class SumLanes(NamedTuple):
    """Where the reductions of each rank are."""

    rows: NDArray[np.int64]  # of all reductions
    begin: NDArray[np.int64]  # rank -> its first among `rows`
    issued: NDArray[np.int64]  # rank -> how many it has issued
    over: NDArray[np.int64]  # rank -> how many are over
    came: NDArray[np.uint8]  # ranks whose next one counts in `members`
    members: NDArray[np.int64]  # reduction -> ranks whose lane has come to it
    stack: NDArray[np.int64]  # ranks whose lane may go on


class Waits(NamedTuple):
    """What `run` reads."""

    sizes: Sizes
    where: NDArray[np.int32]
    wiring: Wiring
    sums: NeededSums
    sum_of: NDArray[np.int64]
    beside: NDArray[np.int64]  # ranks, by their place in their replica
    beside_offsets: NDArray[np.int64]
    gates: NDArray[
        np.int64
    ]  # message -> the one that must be posted before it is sent; empty: itself
    collects: NDArray[np.int64]  # meeting -> its first rank, how far apart they are, and how many


def stops(code: Columns, facts: Facts, capacity: int | None = 0) -> NDArray[np.int64]:
    """Return, per rank, the row at which it stops forever, or the end of its rows.

    The program must have passed the walks of rules.py.
    """
    sizes, num_ranks = facts.sizes, len(code.offsets) - 1
    num_messages = len(facts.places.send_at)
    gates = np.empty(0, np.int64) if capacity == 0 else _gates(code, facts, capacity)
    beside = np.argsort(sizes.column, kind="stable"), np.cumsum([0, *np.bincount(sizes.column)])
    known = facts.places.where, facts.wiring, facts.sums, facts.sum_of
    apart = num_ranks // (int(sizes.replica[-1]) + 1)
    own = facts.collects
    groups = [(first, apart, own.tensor) for first in own.meeting_first.tolist()]
    collects = np.array(groups, np.int64).reshape(-1, 3)
    waits = Waits(sizes, *known, *beside, gates, collects)
    reduces = np.flatnonzero(code.op == REDUCE)
    lanes = SumLanes(
        reduces,
        np.searchsorted(reduces, code.offsets[:-1]),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.uint8),
        np.zeros(len(facts.sums.hows), np.int64),
        np.zeros(num_ranks + 1, np.int64),
    )
    traffic = Traffic(
        np.zeros(num_messages, np.uint8),
        np.full(num_ranks, -1, np.int64),
        np.zeros(num_ranks, np.uint8),
        lanes,
        np.zeros(num_ranks, np.int64),
        np.zeros(num_ranks, np.int64),
        code.offsets[:-1].copy(),
        np.arange(num_ranks)[::-1].copy(),
        np.ones(num_ranks, np.uint8),
    )
    _run(code, waits, traffic)
    return traffic.row


def _gates(code: Columns, facts: Facts, capacity: int | None) -> NDArray[np.int64]:
    """Return for each message the one `capacity` places before it on its channel, or -1."""
    send_at = facts.places.send_at
    gates = np.full(len(send_at), -1, np.int64)
    messages = np.flatnonzero(send_at >= 0)
    messages = messages[np.argsort(send_at[messages])]
    if capacity is None or len(messages) <= capacity:
        return gates
    num_ranks = len(code.offsets) - 1
    rows = send_at[messages]
    senders = np.searchsorted(code.offsets, rows, side="right") - 1
    channels = senders.astype(np.int64) * num_ranks + code.peer[rows]
    by_channel = np.argsort(channels, kind="stable")
    messages, channels = messages[by_channel], channels[by_channel]
    same = channels[capacity:] == channels[: len(channels) - capacity]
    gates[messages[capacity:][same]] = messages[: len(messages) - capacity][same]
    return gates


@loop
def _run(code: Columns, waits: Waits, traffic: Traffic) -> None:  # long: a case for each op
    """Run every rank as far as it gets."""
    top = len(traffic.ready)
    while top > 0:
        top -= 1
        rank = traffic.ready[top]
        traffic.queued[rank] = 0
        while traffic.row[rank] < code.offsets[rank + 1]:
            row = int(traffic.row[rank])
            op = code.op[row]
            if op == REDUCE:
                if not traffic.arrived[rank]:
                    top = _issue(code, rank, waits, traffic, top)
                    traffic.arrived[rank] = waits.sums.hows[waits.sum_of[code.edge[row]]] >= NORM
                if traffic.arrived[rank]:
                    if traffic.lanes.over[rank] < traffic.lanes.issued[rank]:
                        break
                    traffic.arrived[rank] = 0
            elif WAITS_FOR_SUMS[op, code.kind[row]]:
                if traffic.lanes.over[rank] < traffic.lanes.issued[rank]:
                    break
            elif op == UNSHARD:  # on the same lane
                if traffic.lanes.over[rank] < traffic.lanes.issued[rank]:
                    break
                if not _come(rank, waits, traffic):
                    break
                top = _let_go(rank, waits, traffic, top)
            elif op == COLLECT:
                if traffic.lanes.over[rank] < traffic.lanes.issued[rank]:
                    break
                first, apart, count = waits.collects[code.slot[row]]
                traffic.at_collect[first] += 1 - traffic.arrived[rank]
                traffic.arrived[rank] = 1
                if traffic.at_collect[first] < count:
                    break
                traffic.at_collect[first] = 0
                for at in range(count):
                    top = _release(int(first + at * apart), rank, traffic, top)
            elif op == COMPUTE:
                if not _can_compute(code, row, rank, waits, traffic):
                    break
            elif op in (SEND, RECEIVE):
                done, waited = _pass(code, row, rank, waits, traffic)
                if not done:
                    break
                if waited >= 0 and not traffic.queued[waited]:
                    top = _push(waited, traffic, top)
            traffic.row[rank] += 1


@part
def _push(rank: int, traffic: Traffic, top: int) -> int:
    traffic.ready[top] = rank
    traffic.queued[rank] = 1
    return top + 1


@part
def _can_compute(code: Columns, row: int, rank: int, waits: Waits, traffic: Traffic) -> bool:
    sizes, wiring, kind = waits.sizes, waits.wiring, code.kind[row]
    if kind == W:
        return True
    replica, micro_batch = sizes.replica[rank], code.micro_batch[row]
    key = 2 * int(code.stage[row]) + (kind != F)
    for place_in_list in range(wiring.into_offsets[key], wiring.into_offsets[key + 1]):
        edge = wiring.into[place_in_list]
        source = (replica * sizes.stages + wiring.source[edge]) * sizes.micro_batches + micro_batch
        message = (replica * sizes.edges + edge) * sizes.micro_batches + micro_batch
        if waits.where[source] != rank and not traffic.messages[message] & SENT:
            traffic.waits_for[rank] = message
            return False
    traffic.waits_for[rank] = -1
    return True


@part
def _pass(code: Columns, row: int, rank: int, waits: Waits, traffic: Traffic) -> tuple[bool, int]:
    """Send or post; return whether that was possible, and the rank that waited for it, or -1."""
    sizes = waits.sizes
    replica = sizes.replica[rank]
    message = (replica * sizes.edges + code.edge[row]) * sizes.micro_batches + code.micro_batch[row]
    if code.op[row] == SEND:
        gate = message if len(waits.gates) == 0 else waits.gates[message]
        if gate >= 0 and not traffic.messages[gate] & POSTED:
            traffic.waits_for[rank] = gate
            return False, -1
        traffic.waits_for[rank] = -1
        traffic.messages[message] |= SENT
    else:
        traffic.messages[message] |= POSTED
    peer = int(code.peer[row])
    return True, (peer if traffic.waits_for[peer] == message else -1)


@part
def _issue(code: Columns, rank: int, waits: Waits, traffic: Traffic, top: int) -> int:
    """Put a reduction on the lane of `rank`, and end all that can end now."""
    sums, lanes = waits.sums, traffic.lanes
    lanes.issued[rank] += 1
    lanes.stack[0], height = rank, 1
    while height > 0:
        height -= 1
        lane = lanes.stack[height]
        if lanes.came[lane] or lanes.over[lane] == lanes.issued[lane]:
            continue
        lanes.came[lane] = 1
        one = waits.sum_of[code.edge[lanes.rows[lanes.begin[lane] + lanes.over[lane]]]]
        lanes.members[one] += 1
        first, end = sums.rank_offsets[one], sums.rank_offsets[one + 1]
        if lanes.members[one] == end - first:
            lanes.members[one] = 0
            for place in range(first, end):
                member = sums.ranks[place]
                lanes.over[member] += 1
                lanes.came[member] = 0
                lanes.stack[height] = member
                height += 1
                if member != rank and not traffic.queued[member]:
                    top = _push(member, traffic, top)
    return top


@part
def _come(rank: int, waits: Waits, traffic: Traffic) -> bool:
    """Let `rank` reach an Unshard; return whether all members are there now."""
    column = waits.sizes.column[rank]
    traffic.at_gather[column] += 1 - traffic.arrived[rank]
    traffic.arrived[rank] = 1
    return (
        traffic.at_gather[column] == waits.beside_offsets[column + 1] - waits.beside_offsets[column]
    )


@part
def _let_go(rank: int, waits: Waits, traffic: Traffic, top: int) -> int:
    """Let all members of an Unshard go on, `rank` being the last to arrive."""
    column = waits.sizes.column[rank]
    traffic.at_gather[column] = 0
    for place in range(waits.beside_offsets[column], waits.beside_offsets[column + 1]):
        top = _release(waits.beside[place], rank, traffic, top)
    return top


@part
def _release(member: int, last: int, traffic: Traffic, top: int) -> int:
    traffic.arrived[member] = 0
    if member != last:
        traffic.row[member] += 1
        if not traffic.queued[member]:
            top = _push(member, traffic, top)
    return top
