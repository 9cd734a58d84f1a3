"""A plain simulation to compare with: threads on one clock, every event in time order."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from penstock.cluster import Cluster, Link
from penstock.program.program import (
    Compute,
    Program,
    Receive,
    Reshard,
    Send,
    Unshard,
    Update,
)
from penstock.program.reductions import Reduction
from penstock.schedule import Action
from penstock.timeline import Lane, Span

Message = tuple[int, int, int]  # receiver, edge, micro-batch
Wake = Callable[[], bool]


class Reference:
    """Runs a program event by event; `spans` is what was done."""

    def __init__(
        self,
        program: Program,
        seconds: Callable[..., float],
        cluster: Cluster | None,
        capacity: int | None,
        unshard: Sequence[tuple[float, int]] = (),
    ) -> None:
        """`seconds` is of an action, or, with seconds and bytes to unshard, of it and its rank."""
        self.program, self.seconds, self.cluster = program, seconds, cluster
        self.capacity, self.unshard = capacity, unshard
        self.now, self.number, self.events = (
            0.0,
            0,
            list[tuple[float, int, int, Callable[[], None]]](),
        )
        self.waiting = deque[tuple[Wake, Iterator[float | Wake]]]()
        self.spans = list[Span]()
        self.arrived, self.posted = set[Message](), set[Message]()
        self.paid = dict[Message, float]()
        self.under_way = defaultdict[tuple[int, int], int](int)
        self.free = defaultdict[object, float](float)
        self.link_until, self.slowdown = defaultdict[int, float](float), dict[int, float]()
        self.sums_until, self.free_part = defaultdict[int, float](float), dict[int, float]()
        self.queues = defaultdict[int, deque[tuple[object, tuple[int, ...], float, Span]]](deque)
        self.running = set[int]()
        self.gathered, self.gathers = set[tuple[int, int]](), set[tuple[int, int]]()

    def run(self) -> list[Span]:
        for rank in range(self.program.num_ranks):
            self.go_on(self.thread(rank))
        self.wake()
        while self.events:
            self.now, *_, event = heapq.heappop(self.events)
            event()
            self.wake()
        assert not self.waiting
        return self.spans

    def at(self, time: float, event: Callable[[], None], row: int = -1) -> None:
        """Messages that come to a lane at one time are served in the order of their rows."""
        self.number += 1
        heapq.heappush(self.events, (time, row, self.number, event))

    def go_on(self, thread: Iterator[float | Wake]) -> None:
        for wanted in thread:
            if callable(wanted):
                if not wanted():
                    self.waiting.append((wanted, thread))
                    return
            elif wanted > 0:
                self.at(self.now + wanted, lambda: self.go_on(thread))
                return

    def wake(self) -> None:
        woken = True
        while woken:
            woken = False
            for _ in range(len(self.waiting)):
                wanted, thread = self.waiting.popleft()
                if wanted():
                    woken = True
                    self.go_on(thread)
                else:
                    self.waiting.append((wanted, thread))

    def sum_s(self, size_bytes: float, members: tuple[int, ...]) -> float:
        """Over hosts whose devices copy by themselves it is the faster of a ring and a tree."""
        if self.cluster is None:
            return 0.0
        hosts = {self.cluster.host_of(rank).name for rank in members}
        by_gloo = len(hosts) > 1 and not any(kind.copy_engine for kind in self.cluster.devices)
        return self.cluster.all_reduce_s(size_bytes, members, "ring" if by_gloo else None)

    def thread(self, rank: int) -> Iterator[float | Wake]:
        first = int(self.program.code.offsets[rank])
        for row, instruction in enumerate(self.program.code[rank], first):
            match instruction:
                case Compute(action):
                    yield from self.compute(rank, action)
                case Update(stage, step):
                    yield lambda: not self.queues[rank]
                    yield from self.work(rank, "update", Action("U", stage, step))
                case Send():
                    yield from self.send(rank, row, instruction)
                case Receive(of, edge):
                    self.posted.add((rank, edge, of.micro_batch))
                    self.finish((rank, edge, of.micro_batch), instruction.peer)
                case _ if isinstance(instruction, Reduction):
                    size_bytes, members = instruction.size_bytes, instruction.ranks
                    takes = self.sum_s(size_bytes, members)
                    if instruction.word == "shards":
                        yield lambda: all(item[0][1:] != ("shards",) for item in self.sums(rank))
                        if self.cluster:
                            size_bytes *= self.stretch(members)
                            how = "reduce_scatter", size_bytes, members
                            takes = self.cluster.collective_s(*how)
                    takes += (2 - (instruction.word == "shards")) * self.handed(members)
                    span = Span(rank, "collective", "reduce", -1, instruction.step, 0, 0)
                    times = 1 if instruction.word == "shards" else 2
                    self.beside(rank, takes, times * instruction.size_bytes, members)
                    self.issue(rank, (instruction.bucket, instruction.word), members, takes, span)
                case Unshard(stage):
                    ranks = self.program.grid.num_ranks
                    members = tuple(range(rank % ranks, self.program.num_ranks, ranks))
                    span = Span(rank, "collective", "unshard", stage, -1, 0, 0)
                    self.gathers.add((rank, stage))
                    takes, size_bytes = self.unshard[stage] if self.unshard else (0.0, 0)
                    whole = size_bytes
                    if self.cluster and self.unshard:
                        size_bytes *= self.stretch(members)
                        takes += self.cluster.collective_s("all_gather", size_bytes, members)
                        takes += self.handed(members)
                    self.beside(rank, takes, whole, members)
                    self.issue(rank, stage, members, takes, span)
                case Reshard(stage):
                    self.gathers.discard((rank, stage))
                    self.gathered.discard((rank, stage))

    def beside(self, rank: int, takes: float, size_bytes: int, members: Sequence[int]) -> None:
        """Note what a collective leaves of the rank's core; it sends all of it but one part."""
        lost = 0.0
        if self.cluster and len(members) > 1:
            ring = [self.cluster.link(a, b) for a, b in pairwise(members)]
            ring.append(self.cluster.link(members[-1], members[0]))
            slowest = max(ring, key=lambda link: 1 / link.bytes_per_s)
            sent = size_bytes * (1 - 1 / len(members))
            wire = sent / slowest.bytes_per_s
            lost = wire - wire / (1 + slowest.slowdown)
            if sent and (slowest.core_s or slowest.core_bytes_per_s < float("inf")):
                lost = slowest.core_s + sent / slowest.core_bytes_per_s
        self.sums_until[rank] = max(self.sums_until[rank], self.now) + takes
        self.free_part[rank] = 1 - min(1.0, lost / takes) if takes > 0 else 1.0

    def handed(self, members: Sequence[int]) -> float:
        """Return what a rank does to send a message to its neighbour n - 1 times, and to receive
        as many."""
        if not self.cluster or len(members) == 1:
            return 0.0
        ring = [self.cluster.link(a, b) for a, b in pairwise([*members, members[0]])]
        _, slowest = min((link.bytes_per_s, at) for at, link in enumerate(ring))
        return sum(2 * ring[slowest].overhead_s for _ in members[1:])

    def stretch(self, members: Sequence[int]) -> float:
        """Return how many times an equal part the largest of them is."""
        parts = [self.program.parts[rank] for rank in members] if self.program.parts else [1]
        return max(parts) * len(parts) / sum(parts)

    def sums(self, rank: int) -> list[tuple]:
        """Return the Reduces of a rank that are not over."""
        return [item for item in self.queues[rank] if isinstance(item[0], tuple)]

    def compute(self, rank: int, action: Action) -> Iterator[float | Wake]:
        kind, stage, micro_batch = action
        needed = [
            (rank, number, micro_batch)
            for number, edge in enumerate(self.program.edges)
            if edge.target == stage and (edge.kind == "F") == (kind == "F")
        ]
        needed = [message for message in needed if message in self.posted]
        yield lambda: all(message in self.arrived for message in needed)
        if (rank, stage) in self.gathers:
            yield lambda: (rank, stage) in self.gathered
        if kind != "W":
            yield sum(self.paid[message] for message in needed)
        yield from self.work(rank, "compute", action)

    def takes(self, rank: int, action: Action) -> float:
        if self.unshard:
            return self.seconds(action, rank)
        free = action.kind == "U" and self.program.weight_rule.name == "synchronous"
        return 0.0 if free else self.seconds(action)

    def work(self, rank: int, lane: Lane, action: Action) -> Iterator[float]:
        takes = self.takes(rank, action)
        start, left = self.now, takes
        until = self.link_until[rank]
        if until > start:
            done = (until - start) / (1 + self.slowdown[rank])
            if left <= done:
                takes = left * (1 + self.slowdown[rank])
            else:
                takes = until - start + left - done
        beside = self.sums_until[rank] - start
        if beside > 0:
            rate = self.free_part[rank]  # of the core, until the collective is over
            takes = takes / rate if takes < beside * rate else beside + takes - beside * rate
        yield takes
        self.spans.append(Span(rank, lane, *action, start, self.now))

    def send(self, rank: int, row: int, send: Send) -> Iterator[float | Wake]:
        peer, message = send.peer, (send.peer, send.edge, send.of.micro_batch)
        if self.capacity == 0:
            yield lambda: message in self.posted
        elif self.capacity is not None:
            capacity = self.capacity
            yield lambda: self.under_way[rank, peer] < capacity
        self.under_way[rank, peer] += 1
        size_bytes, link = self.program.edges[send.edge].size_bytes, Link(0.0, float("inf"))
        if self.cluster:
            link = self.cluster.link(rank, peer)
        self.paid[message] = link.end_s(size_bytes)
        yield link.end_s(size_bytes)
        wire = size_bytes / link.bytes_per_s
        if link.slowdown > 0:
            self.link_until[rank] = max(self.link_until[rank], self.now) + wire
            self.slowdown[rank] = link.slowdown
        self.carry(rank, row, send, link, wire)

    def carry(self, rank: int, row: int, send: Send, link: Link, wire: float) -> None:
        peer, message = send.peer, (send.peer, send.edge, send.of.micro_batch)
        shared = self.cluster.lanes(rank, peer) if self.cluster else ()
        lanes: list[object] = list(shared) if shared else [(rank, peer)]
        record = self.cluster is not None or self.capacity is not None

        def leave() -> None:
            start = self.take(lanes[0], wire)
            if record:
                self.spans.append(Span(rank, "send", *send.of, start, start + wire))
            self.at(start + link.latency_s, reach, row)

        def reach() -> None:
            begin = self.now if len(lanes) == 1 else self.take(lanes[1], wire)
            if record:
                self.spans.append(Span(peer, "receive", *send.of, begin, begin + wire))
            self.at(begin + wire, arrive)

        def arrive() -> None:
            self.arrived.add(message)
            self.finish(message, rank)

        self.at(self.now, leave, row)

    def take(self, lane: object, seconds: float) -> float:
        start = max(self.now, self.free[lane])
        self.free[lane] = start + seconds
        return start

    def finish(self, message: Message, sender: int) -> None:
        if message in self.arrived and message in self.posted:
            self.under_way[sender, message[0]] -= 1

    def issue(
        self, rank: int, key: object, members: tuple[int, ...], takes: float, span: Span
    ) -> None:
        self.queues[rank].append((key, members, takes, span))
        self.begin(members)

    def begin(self, members: tuple[int, ...]) -> None:
        heads = [self.queues[rank][0] if self.queues[rank] else None for rank in members]
        if any(head is None or head[:2] != heads[0][:2] for head in heads):
            return
        if heads[0][1] != members:  # what was issued stands behind one that waits for other ranks
            return
        if self.running & set(members):
            return
        self.running |= set(members)
        begun, takes = self.now, heads[0][2]

        def over() -> None:
            self.running.difference_update(members)
            for rank in members:
                *_, span = self.queues[rank].popleft()
                self.spans.append(span._replace(start_s=begun, end_s=self.now))
                if span.kind == "unshard":
                    self.gathered.add((rank, span.stage))
            for rank in members:
                if self.queues[rank]:
                    self.begin(self.queues[rank][0][1])

        self.at(self.now + takes, over)
