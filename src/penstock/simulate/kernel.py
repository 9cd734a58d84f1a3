"""The loops of the simulation: arrays in, arrays out.

Every rank walks through its instructions with its own clock until it must wait for another,
which then wakes it.  As long as no lane is shared by several senders, the order in which ranks are
walked changes no time: each is a maximum of sums.  A shared lane serves messages in the order of
the times at which they come; then those times go through a heap, and the earliest is served when
no rank can walk on, for nothing earlier can still come.

All loops are in this one file, because numba's cache of a function does not notice a change in
another file.  `run` takes its arrays apart once and is long, because passing dozens of arrays from
function to function made it take four times as long to compile.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from penstock.program.codes import (
    BEGIN_OFFLOAD,
    BEGIN_RELOAD,
    COLLECT,
    COMPUTE,
    COST_ROW,
    JOINS,
    OFFLOAD,
    RECEIVE,
    RELOAD,
    SEND,
    WAITS_FOR_SUMS,
    WORKS,
    Numbers,
)
from penstock.schedule.compiled import compiled
from penstock.schedule.orders import F, W

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

DONE, FULL = 0, 1  # why `run` came to an end
ABSENT, POSTED = -2.0, -1.0  # in place of the time at which a message arrived or weights were there
NOTHING, ARRIVAL, POST, COLLECTIVE, TURN = range(5)  # what a rank waits for


class Code(NamedTuple):
    """The columns of a program's code that matter here."""

    op: NDArray[np.uint8]
    kind: NDArray[np.uint8]
    stage: Numbers
    micro_batch: NDArray[np.int32]
    edge: Numbers
    peer: Numbers
    offsets: Ints


class Extents(NamedTuple):
    """How many of each there are, and what is wanted."""

    edges: int
    micro_batches: int  # over the whole window
    stages: int
    replica: NDArray[np.int64]  # of each rank
    capacity: int  # messages of a route that may wait for their receive; -1: any number


class IncomingEdges(NamedTuple):
    """Edges by target: those into F of stage s in list 2 * s, those into B or I in 2 * s + 1."""

    edge: NDArray[np.int32]
    offsets: Ints


class Routes(NamedTuple):
    """Pairs of a sender and a receiver, over which messages go."""

    size_bytes: Floats  # of an edge's messages
    offsets: Ints  # routes by sender; empty where messages cost nothing and never wait
    peer: Ints  # the receiver
    link: Floats  # [route, LATENCY ... SLOWDOWN]
    lanes: Ints  # [route, FIRST ... SECOND_SHARED]; no second lane: -1


SENDING, UNDER_WAY, READING = range(3)
PACKING, UNPACKING = range(2)
LATENCY, PER_BYTE, OVERHEAD, PER_COPIED_BYTE, SLOWDOWN = range(5)
FIRST, SECOND, FIRST_SHARED, SECOND_SHARED = range(4)


class Durations(NamedTuple):
    """Seconds of actions."""

    action_s: Floats  # [row of costs, stage, device kind]
    device: Ints  # rank -> device kind
    listed_s: Floats  # of all that works, as it stands in the code; empty: action_s
    packing_s: Floats  # [packing or unpacking, edge, device kind]; no edges: nothing


class Threads(NamedTuple):
    """The computing thread of every rank."""

    row: Ints
    clock_s: Floats
    busy_s: Floats  # so far, in computes and updates
    link_s: Floats  # when its own messages so far will be off the link
    slowdown: Floats  # of the link of the last of them
    sums_s: Floats  # when its collectives so far will be over, if each began where it was issued
    taken: Floats  # the part of its core that the last of them takes


class Agenda(NamedTuple):
    """What every rank waits for, who need not wait, and the messages on the way to shared lanes."""

    what: Ints  # NOTHING ... TURN
    message: Ints
    ready: Ints  # a stack of ranks
    height: Ints  # [1]: of that stack
    heap_s: Floats  # by time, then by place in the code
    heap: Ints  # 2 * row of the Send, plus 1 at its second lane
    pending: Ints  # [1]: messages on the heap


class Letters(NamedTuple):
    """Messages, numbered (replica * edges + edge) * micro_batches + micro_batch; routes; lanes."""

    arrival_s: Floats  # or ABSENT or POSTED
    end_s: Floats  # what it costs the receiver's computing thread; empty: nothing
    posted_s: Floats  # when its receive was posted, or ABSENT; empty with capacity -1
    given_s: Floats  # [message, SENDING ... READING] in place of the link's; empty: the link's
    sent: Ints  # by route: so far
    last: Ints  # [route * capacity]: the last messages
    free_s: Floats  # by lane: when it has served all so far


class Queues(NamedTuple):
    """Reduces and Unshards: a queue for every rank, served in order.  Groups are who takes part."""

    offsets: Ints
    group: Ints  # by item of a queue
    taken_s: Floats  # by item: how long it takes
    share: Floats  # by item: of its rank's core, that it takes meanwhile; empty: nothing
    gathers: Ints  # by item: rank * stages + stage of an Unshard; -1: reduction
    after: Ints  # by item: that of its queue that is over before it is issued, or -1
    issued_s: Floats  # by item
    begun_s: Floats  # by item
    over_s: Floats  # by item
    issued: Ints  # by rank: how many so far
    over: Ints  # by rank: how many have begun, and so have a known end
    counted: Ints  # by rank: its first that has not begun is counted in `came`
    came: Ints  # by group: members that wait at it
    member: Ints  # ranks by group
    member_offsets: Ints
    gathered_s: Floats  # [rank * stages + stage]: when the weights are there, or ABSENT or POSTED
    stack: Ints  # scratch: ranks whose queue may go on


class CollectQueues(NamedTuple):
    """Collects, each of which begins when all its ranks came; empty where there is none.

    Those of a rank are over one after the other; what reads one waits for it, as for a message.
    """

    first: Ints  # by rank: its first one
    came: Ints  # by rank: how many it came to
    over: Ints  # by first rank: how many are over
    group: Ints  # by item, as they stand in the code: the first of its ranks
    apart: int  # the ranks of a group are so far from each other
    members: int  # and so many
    taken_s: Floats  # by item
    share: Floats  # by item: of its rank's core, that it takes beside a compute; empty: nothing
    message: Ints  # by item: as which it arrives
    issued_s: Floats  # by item
    free_s: Floats  # by first rank: when all that began are over
    times_s: Floats  # [item, 2]: from when to when


class CopyLanes(NamedTuple):
    """CopyLanes to far memory and back that were begun; empty where none is."""

    begun_s: Floats  # [what is copied]: when its thread reached the instruction, or ABSENT
    free_s: Floats  # [rank, to far memory or back]: when all that was waited for was over


class Stamps(NamedTuple):
    """When each thing was done; empty where that is not asked for."""

    works: Ints  # by rank: place of the next of those that work
    work_s: Floats  # [of all that works, 2]: start and end
    sends: Ints  # by rank: place of its next Send
    send_s: Floats  # [Sends, 2]: first and last byte on the first lane


class Simulation(NamedTuple):
    """All that is given, and all that changes."""

    code: Code
    sizes: Extents
    inputs: IncomingEdges
    routes: Routes
    durations: Durations
    threads: Threads
    agenda: Agenda
    mail: Letters
    queues: Queues
    copies: CopyLanes
    record: Stamps
    meetings: CollectQueues


@compiled
def run(job: Simulation) -> int:  # long: see the top of the file
    """Go on until every rank is at its end or waits forever: DONE; or until the heap is FULL."""
    (
        code,
        sizes,
        inputs,
        routes,
        durations,
        threads,
        agenda,
        mail,
        queues,
        copies,
        record,
        meetings,
    ) = job
    ops, kinds, stages, micro_batches, edges, peers, offsets = code
    into, into_offsets = inputs
    size_bytes, route_offsets, route_peers, link, lanes = routes
    action_s, device, listed_s, packing_s = durations
    rows, clock_s, busy_s, link_s, slowdown, sums_s, taken = threads
    what, _, ready, height, heap_s, heap, pending = agenda
    arrival_s, end_s, posted_s, given_s, sent, last, free_s = mail
    works, work_s, sends, send_s = record
    gathered_s, issued, over = queues.gathered_s, queues.issued, queues.over
    begun_s, copied_s = copies
    capacity, rank = sizes.capacity, -1
    while True:
        lane, sender, sent_row, route, message, now_s = -1, rank, 0, 0, 0, 0.0  # none in hand
        if rank < 0 and height[0] > 0:
            height[0] -= 1
            rank = int(ready[height[0]])
            what[rank] = NOTHING
        if rank >= 0:
            # Walk on with `rank`, until it waits, is at its end, or has a message in hand.
            base, row = sizes.replica[rank] * sizes.edges, rows[rank]
            while row < offsets[rank + 1]:
                op, stage = ops[row], int(stages[row])
                message = int((base + edges[row]) * sizes.micro_batches + micro_batches[row])
                if WORKS[op]:
                    kind = int(kinds[row])
                    start_s, paid_s, missing = clock_s[rank], 0.0, -1
                    if WAITS_FOR_SUMS[op, kind]:
                        if over[rank] < issued[rank]:
                            _wait(rank, COLLECTIVE, 0, agenda)
                            break
                        if over[rank] > 0:
                            item = queues.offsets[rank] + over[rank] - 1
                            start_s = max(start_s, queues.over_s[item])
                    elif op == COMPUTE:
                        side = 2 * stage + (kind != F)
                        for place in range(into_offsets[side], into_offsets[side + 1]):
                            number = int((base + into[place]) * sizes.micro_batches)
                            number += int(micro_batches[row])
                            there_s = arrival_s[number]
                            if there_s == POSTED:
                                missing = number
                            elif there_s >= 0.0:  # else it was made on this rank, and is there
                                start_s = max(start_s, there_s)
                                if len(end_s) > 0 and kind != W:
                                    paid_s += end_s[number]
                        if missing >= 0:
                            _wait(rank, ARRIVAL, missing, agenda)
                            break
                        if len(gathered_s) > 0:
                            there_s = gathered_s[rank * sizes.stages + stage]
                            if there_s == POSTED:
                                _wait(rank, COLLECTIVE, 0, agenda)
                                break
                            start_s = max(start_s, there_s)
                    start_s += paid_s
                    if len(listed_s) > 0:
                        duration_s = listed_s[works[rank]]
                    else:
                        duration_s = action_s[COST_ROW[op, kind], stage, device[rank]]
                    if len(begun_s) > 0 and (op == OFFLOAD or op == RELOAD):  # noqa: SIM109
                        at = _copied(rank, row, code, sizes)
                        side = int(op == RELOAD)
                        if begun_s[at] != ABSENT:  # it ran beside the thread, after others
                            start_s = max(begun_s[at], copied_s[rank, side])
                            copied_s[rank, side] = start_s + duration_s
                            begun_s[at] = ABSENT
                            clock_s[rank] = max(clock_s[rank], start_s + duration_s)
                            if len(work_s) > 0:
                                work_s[works[rank], 0] = start_s
                                work_s[works[rank], 1] = start_s + duration_s
                            works[rank] += 1
                            row += 1
                            continue
                    beside_s = link_s[rank] - start_s
                    if beside_s > 0.0:  # beside a busy link, work takes 1 + slowdown times as long
                        slower = 1.0 + slowdown[rank]
                        longer_s = duration_s + beside_s - beside_s / slower
                        duration_s = min(duration_s * slower, longer_s)
                    beside_s = sums_s[rank] - start_s
                    if beside_s > 0.0:  # beside a collective it has what that leaves of the core
                        left = 1.0 - taken[rank]
                        longer_s = duration_s + beside_s * taken[rank]
                        if duration_s < beside_s * left:
                            longer_s = duration_s / left
                        duration_s = longer_s
                    clock_s[rank] = start_s + duration_s
                    busy_s[rank] += duration_s
                    if len(work_s) > 0:
                        work_s[works[rank], 0], work_s[works[rank], 1] = start_s, clock_s[rank]
                    works[rank] += 1
                elif op == SEND and len(route_offsets) == 0:
                    arrival_s[message] = clock_s[rank]
                    _wake(int(peers[row]), ARRIVAL, message, agenda)
                elif op == SEND:
                    if pending[0] == len(heap):
                        rows[rank] = row
                        _rise(rank, agenda)
                        return FULL
                    route = _route(rank, int(peers[row]), route_offsets, route_peers)
                    slot = route * capacity
                    before = message if capacity == 0 else -1  # what must be where it goes to
                    if capacity > 0:
                        slot += sent[route] % capacity
                        before = int(last[slot]) if sent[route] >= capacity else -1
                    if before >= 0:
                        if posted_s[before] == ABSENT:
                            _wait(rank, POST, before, agenda)
                            break
                        if capacity > 0 and arrival_s[before] < 0.0:
                            _wait(rank, ARRIVAL, before, agenda)
                            break
                        clock_s[rank] = max(clock_s[rank], posted_s[before], arrival_s[before])
                    if capacity > 0:
                        last[slot] = message
                        sent[route] += 1
                    paid_s = size_bytes[edges[row]] * link[route, PER_COPIED_BYTE]
                    paid_s += link[route, OVERHEAD]
                    if len(given_s) > 0:
                        paid_s = given_s[message, SENDING]
                    clock_s[rank] += paid_s
                    if len(end_s) > 0:
                        end_s[message] = given_s[message, READING] if len(given_s) > 0 else paid_s
                    if packing_s.shape[1] > 0:
                        clock_s[rank] += packing_s[PACKING, edges[row], device[rank]]
                        end_s[message] += packing_s[UNPACKING, edges[row], device[peers[row]]]
                    if link[route, SLOWDOWN] > 0.0:
                        wire_s = size_bytes[edges[row]] * link[route, PER_BYTE]
                        link_s[rank] = max(link_s[rank], clock_s[rank]) + wire_s
                        slowdown[rank] = link[route, SLOWDOWN]
                    if lanes[route, FIRST_SHARED]:
                        _push(clock_s[rank], 2 * row, heap_s, heap, pending)
                        _wait(rank, TURN, 0, agenda)
                    else:
                        lane, sender, sent_row, now_s = FIRST, rank, row, clock_s[rank]
                    row += 1
                    break
                elif op == RECEIVE:
                    if arrival_s[message] == ABSENT:
                        arrival_s[message] = POSTED
                    if len(posted_s) > 0:
                        posted_s[message] = clock_s[rank]
                        _wake(int(peers[row]), POST, message, agenda)
                elif JOINS[op]:
                    before = int(queues.after[queues.offsets[rank] + issued[rank]])
                    if before >= 0:
                        if before >= queues.offsets[rank] + over[rank]:
                            _wait(rank, COLLECTIVE, 0, agenda)
                            break
                        clock_s[rank] = max(clock_s[rank], queues.over_s[before])
                    if len(queues.share) > 0:
                        item = queues.offsets[rank] + issued[rank]
                        sums_s[rank] = max(sums_s[rank], clock_s[rank]) + queues.taken_s[item]
                        taken[rank] = queues.share[item]
                    _issue(rank, clock_s[rank], queues, agenda)
                elif op == COLLECT:
                    if over[rank] < issued[rank]:
                        _wait(rank, COLLECTIVE, 0, agenda)
                        break
                    if over[rank] > 0:
                        last_item = queues.offsets[rank] + over[rank] - 1
                        clock_s[rank] = max(clock_s[rank], queues.over_s[last_item])
                    if len(meetings.share) > 0:
                        item = meetings.first[rank] + meetings.came[rank]
                        sums_s[rank] = max(sums_s[rank], clock_s[rank]) + meetings.taken_s[item]
                        taken[rank] = meetings.share[item]
                    arrival_s[message] = POSTED
                    _meet(rank, clock_s[rank], meetings, arrival_s, agenda)
                elif op == BEGIN_OFFLOAD or op == BEGIN_RELOAD:  # noqa: SIM109
                    if WAITS_FOR_SUMS[op, kinds[row]]:
                        if over[rank] < issued[rank]:
                            _wait(rank, COLLECTIVE, 0, agenda)
                            break
                        if over[rank] > 0:
                            item = queues.offsets[rank] + over[rank] - 1
                            clock_s[rank] = max(clock_s[rank], queues.over_s[item])
                    begun_s[_copied(rank, row, code, sizes)] = clock_s[rank]
                row += 1
            rows[rank] = row
            if lane < 0:
                rank = -1
        elif pending[0] > 0:
            # Nobody can walk on: serve the message that comes earliest to a shared lane.
            now_s, event = _pop(heap_s, heap, pending)
            sent_row, lane = event // 2, event % 2
            sender = int(np.searchsorted(offsets, sent_row, side="right")) - 1
            base = sizes.replica[sender] * sizes.edges
            message = int((base + edges[sent_row]) * sizes.micro_batches)
            message += int(micro_batches[sent_row])
            route = _route(sender, int(peers[sent_row]), route_offsets, route_peers)
            if lane == FIRST:
                _wake(sender, TURN, 0, agenda)
        else:
            return DONE
        if lane >= 0:
            # Carry the message in hand: over its first lane, then over its second, if it has one.
            wire_s = size_bytes[edges[sent_row]] * link[route, PER_BYTE]
            if lane == FIRST:
                first = lanes[route, FIRST]
                now_s = max(now_s, free_s[first])
                free_s[first] = now_s + wire_s
                if len(send_s) > 0:
                    place = sends[sender]
                    send_s[place, 0], send_s[place, 1] = now_s, now_s + wire_s
                    sends[sender] += 1
                now_s += link[route, LATENCY]
                if len(given_s) > 0:
                    now_s += given_s[message, UNDER_WAY] - given_s[message, SENDING]
                if lanes[route, SECOND_SHARED]:
                    _push(now_s, 2 * sent_row + SECOND, heap_s, heap, pending)
                    continue
            second = lanes[route, SECOND]
            if second >= 0:
                now_s = max(now_s, free_s[second])
                free_s[second] = now_s + wire_s
            arrival_s[message] = now_s + wire_s
            _wake(int(peers[sent_row]), ARRIVAL, message, agenda)
            _wake(sender, ARRIVAL, message, agenda)  # where it waits for room


@compiled
def _meet(
    rank: int, now_s: float, meetings: CollectQueues, arrival_s: Floats, agenda: Agenda
) -> None:
    """Let a rank come to a Collect; end all that have all their ranks now."""
    item = meetings.first[rank] + meetings.came[rank]
    meetings.issued_s[item] = now_s
    meetings.came[rank] += 1
    first = int(meetings.group[item])
    while True:
        number, begun_s = meetings.over[first], meetings.free_s[first]
        for at in range(meetings.members):
            member = first + at * meetings.apart
            if meetings.came[member] <= number:
                return
            begun_s = max(begun_s, meetings.issued_s[meetings.first[member] + number])
        meetings.over[first] += 1
        over_s = begun_s + meetings.taken_s[meetings.first[rank] + number]
        meetings.free_s[first] = over_s
        for at in range(meetings.members):
            member = first + at * meetings.apart
            item = meetings.first[member] + number
            meetings.times_s[item, 0] = over_s - meetings.taken_s[item]
            meetings.times_s[item, 1] = over_s
            message = int(meetings.message[item])
            arrival_s[message] = over_s
            _wake(member, ARRIVAL, message, agenda)


@compiled
def _copied(rank: int, row: int, code: Code, sizes: Extents) -> int:
    """Return the number of what is copied: what an F keeps, or state or weights of a stage."""
    ranks = len(sizes.replica)
    if code.kind[row] != F:
        return int((rank + ranks * (code.kind[row] == W)) * sizes.stages + code.stage[row])
    at = (sizes.replica[rank] * sizes.stages + code.stage[row]) * sizes.micro_batches
    return int(2 * ranks * sizes.stages + at + code.micro_batch[row])


@compiled
def _wait(rank: int, what: int, message: int, agenda: Agenda) -> None:
    agenda.what[rank], agenda.message[rank] = what, message


@compiled
def _wake(rank: int, what: int, message: int, agenda: Agenda) -> None:
    """Let a rank walk on if this is what it waits for."""
    if agenda.what[rank] == what and agenda.message[rank] == message:
        _rise(rank, agenda)


@compiled
def _rise(rank: int, agenda: Agenda) -> None:
    agenda.what[rank] = NOTHING
    agenda.ready[agenda.height[0]] = rank
    agenda.height[0] += 1


@compiled
def _route(rank: int, peer: int, offsets: Ints, peers: Ints) -> int:
    route = offsets[rank]
    while peers[route] != peer:
        route += 1
    return route


@compiled
def _issue(rank: int, now_s: float, queues: Queues, agenda: Agenda) -> None:
    """Put a rank's next reduction or Unshard into its queue, and begin all that can begin now."""
    place = queues.offsets[rank] + queues.issued[rank]
    queues.issued_s[place] = now_s
    queues.issued[rank] += 1
    if queues.gathers[place] >= 0:
        queues.gathered_s[queues.gathers[place]] = POSTED
    queues.stack[0], top = rank, 1
    while top > 0:
        top -= 1
        rank = queues.stack[top]
        if queues.over[rank] == queues.issued[rank] or queues.counted[rank]:
            continue
        queues.counted[rank] = 1
        group = queues.group[queues.offsets[rank] + queues.over[rank]]
        members = queues.member[queues.member_offsets[group] : queues.member_offsets[group + 1]]
        queues.came[group] += 1
        if queues.came[group] == len(members):
            queues.came[group] = 0
            _begin(members, queues, agenda)
            for member in members:
                queues.stack[top] = member
                top += 1


@compiled
def _begin(members: Ints, queues: Queues, agenda: Agenda) -> None:
    """Let the collective that all its members have reached run."""
    begun_s = 0.0
    for rank in members:
        place = queues.offsets[rank] + queues.over[rank]
        begun_s = max(begun_s, queues.issued_s[place])
        if queues.over[rank] > 0:
            begun_s = max(begun_s, queues.over_s[place - 1])
    for rank in members:
        place = queues.offsets[rank] + queues.over[rank]
        queues.begun_s[place], queues.over_s[place] = begun_s, begun_s + queues.taken_s[place]
        queues.over[rank] += 1
        queues.counted[rank] = 0
        if queues.gathers[place] >= 0:
            queues.gathered_s[queues.gathers[place]] = queues.over_s[place]
        _wake(rank, COLLECTIVE, 0, agenda)


@compiled
def _push(time_s: float, what: int, heap_s: Floats, heap: Ints, pending: Ints) -> None:
    place = pending[0]
    pending[0] += 1
    while place > 0:
        above = (place - 1) // 2
        if heap_s[above] < time_s or (heap_s[above] == time_s and heap[above] < what):
            break
        heap_s[place], heap[place] = heap_s[above], heap[above]
        place = above
    heap_s[place], heap[place] = time_s, what


@compiled
def _pop(heap_s: Floats, heap: Ints, pending: Ints) -> tuple[float, int]:
    first = heap_s[0], heap[0]
    pending[0] -= 1
    size = pending[0]
    last = heap_s[size], heap[size]
    place = 0
    while 2 * place + 1 < size:
        below = 2 * place + 1
        if below + 1 < size and (heap_s[below + 1], heap[below + 1]) < (heap_s[below], heap[below]):
            below += 1
        if last <= (heap_s[below], heap[below]):
            break
        heap_s[place], heap[place] = heap_s[below], heap[below]
        place = below
    heap_s[place], heap[place] = last
    return first


@compiled
def receive_s(job: Simulation) -> Floats:
    """Return for every Receive when its message arrived: [Receives, 2], first and last byte."""
    code, routes, sizes = job.code, job.routes, job.sizes
    times_s = np.empty((np.count_nonzero(code.op == RECEIVE), 2))
    place = 0
    for rank in range(len(code.offsets) - 1):
        base = sizes.replica[rank] * sizes.edges
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            if code.op[row] == RECEIVE:
                message = (base + code.edge[row]) * sizes.micro_batches + code.micro_batch[row]
                route = _route(int(code.peer[row]), rank, routes.offsets, routes.peer)
                wire_s = routes.size_bytes[code.edge[row]] * routes.link[route, PER_BYTE]
                end_s = job.mail.arrival_s[message]
                times_s[place, 0], times_s[place, 1] = end_s - wire_s, end_s
                place += 1
    return times_s


@compiled
def find_routes(code: Code) -> tuple[Ints, Ints]:
    """Return to whom every rank sends, in the order of the first messages, and offsets by rank."""
    num_ranks = len(code.offsets) - 1
    offsets, seen = np.zeros(num_ranks + 1, np.int64), np.full(num_ranks, -1, np.int64)
    peers, place = np.empty(num_ranks, np.int64), 0
    for rank in range(num_ranks):
        for row in range(code.offsets[rank], code.offsets[rank + 1]):
            if code.op[row] == SEND and seen[code.peer[row]] != rank:
                if place == len(peers):
                    peers = np.concatenate((peers, peers))
                seen[code.peer[row]] = rank
                peers[place] = code.peer[row]
                place += 1
        offsets[rank + 1] = place
    return offsets, peers[:place].copy()
