"""The compiled simulation against a plain one: threads on one clock, events in time order."""

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.program.instructions import Edge, TiedGroup
from penstock.program.lower import chain, lower_schedule
from penstock.program.program import (
    Compute,
    Program,
    Receive,
    Reduce,
    Reshard,
    Send,
    Unshard,
    Update,
)
from penstock.schedule import SCHEDULES, Action
from penstock.simulate import simulate
from penstock.timeline import Span, step_s

Message = tuple[int, int, int]  # receiver, edge, micro-batch
Wake = Callable[[], bool]


class Reference:
    """Runs a program event by event; `spans` is what was done."""

    def __init__(
        self,
        program: Program,
        seconds: Callable[[Action], float],
        cluster: Cluster | None,
        capacity: int | None,
        unshard_s: float,
    ) -> None:
        self.program, self.seconds, self.cluster = program, seconds, cluster
        self.capacity, self.unshard_s = capacity, unshard_s
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

    def thread(self, rank: int) -> Iterator[float | Wake]:
        first = int(self.program.code.offsets[rank])
        for row, instruction in enumerate(self.program.code[rank], first):
            match instruction:
                case Compute(action):
                    yield from self.compute(rank, action)
                case Update(stage, step):
                    yield lambda: not self.queues[rank]
                    takes = 0.0
                    if self.program.weight_rule.name != "synchronous":
                        takes = self.seconds(Action("U", stage, step))
                    yield from self.work(rank, "update", Action("U", stage, step), takes)
                case Send():
                    yield from self.send(rank, row, instruction)
                case Receive(of, edge):
                    self.posted.add((rank, edge, of.micro_batch))
                    self.finish((rank, edge, of.micro_batch), instruction.peer)
                case Reduce():
                    size_bytes, members = instruction.size_bytes, instruction.ranks
                    takes = self.cluster.all_reduce_s(size_bytes, members) if self.cluster else 0.0
                    span = Span(rank, "collective", "reduce", -1, instruction.step, 0, 0)
                    self.issue(rank, (instruction.bucket, instruction.how), members, takes, span)
                case Unshard(stage):
                    ranks = self.program.pipeline_ranks
                    members = tuple(range(rank % ranks, self.program.num_ranks, ranks))
                    span = Span(rank, "collective", "unshard", stage, -1, 0, 0)
                    self.gathers.add((rank, stage))
                    self.issue(rank, stage, members, self.unshard_s, span)
                case Reshard(stage):
                    self.gathers.discard((rank, stage))
                    self.gathered.discard((rank, stage))

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
        yield from self.work(rank, "compute", action, self.seconds(action))

    def work(self, rank: int, lane: str, action: Action, takes: float) -> Iterator[float]:
        start, left = self.now, takes
        until = self.link_until[rank]
        if until > start:
            done = (until - start) / (1 + self.slowdown[rank])
            if left <= done:
                takes = left * (1 + self.slowdown[rank])
            else:
                takes = until - start + left - done
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


def edges_of(draw: st.DrawFn, num_stages: int, backward: bool) -> list[Edge]:
    """A chain, some skip connections, and sizes."""
    edges = list(chain(num_stages, backward=backward))
    if num_stages > 2 and draw(st.booleans()):
        edges.append(Edge("F", 0, num_stages - 1))
        if backward:
            edges.append(Edge("B", num_stages - 1, 0))
    sizes = st.integers(0, 9)
    return [edge._replace(size_bytes=draw(sizes)) for edge in edges]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    schedule = draw(st.sampled_from(SCHEDULES))(num_stages, num_micro_batches)
    tied = num_stages > 1 and not schedule.has_updates and draw(st.booleans())
    program = lower_schedule(
        schedule,
        edges=edges_of(draw, num_stages, backward=True),
        tied=[TiedGroup("w", (0, num_stages - 1), draw(st.integers(0, 9)))] if tied else (),
        replicas=draw(st.integers(1, 3)),
        clip=not schedule.has_updates and draw(st.booleans()),
    )
    if not schedule.has_updates and draw(st.booleans()):
        return program.map_ranks(sharded)
    return program


def sharded(code: tuple[object, ...]) -> Iterator[object]:
    """Gather the weights before each compute, and drop them after it."""
    for instruction in code:
        if isinstance(instruction, Compute):
            stage = instruction.action.stage
            yield from (Unshard(stage), instruction, Reshard(stage))
        else:
            yield instruction


positive = st.floats(0.1, 9.0)
perhaps = st.just(0.0) | st.floats(0.01, 2.0)
links = st.builds(Link, perhaps, positive, perhaps, st.just(float("inf")) | positive, perhaps)


@st.composite
def clusters(draw: st.DrawFn, num_ranks: int) -> Cluster:
    hosts: list[Host] = []
    while sum(host.num_devices for host in hosts) < num_ranks:
        region = draw(st.sampled_from(["east", "west"]))
        hosts.append(Host(f"h{len(hosts)}", "d", draw(st.integers(1, 3)), region))
    device = DeviceKind("d", 1, (), 1.0)
    return Cluster((device,), tuple(hosts), draw(links), draw(links), draw(links))


def random_seconds(seed: int) -> Callable[[Action], float]:
    """Return seconds that no two actions share, so that no two events are at one time."""
    return lambda action: random.Random(f"{seed} {action}").random() + 0.01


def rounded(spans: Iterator[Span]) -> list[Span]:
    return sorted(s._replace(start_s=round(s.start_s, 7), end_s=round(s.end_s, 7)) for s in spans)


def check(
    program: Program,
    seed: int,
    cluster: Cluster | None,
    capacity: int | None,
    unshard_s: float = 0.0,
) -> None:
    timeline = simulate(program, random_seconds(seed), cluster, capacity=capacity)
    expected = Reference(program, random_seconds(seed), cluster, capacity, unshard_s).run()
    mine, theirs = rounded(iter(timeline.spans)), rounded(iter(expected))
    assert [span[:5] for span in mine] == [span[:5] for span in theirs]
    for a, b in zip(mine, theirs, strict=True):
        assert (a.start_s, a.end_s) == pytest.approx((b.start_s, b.end_s), abs=1e-6), (a, b)
    assert step_s(timeline) == pytest.approx(max(span.end_s for span in expected))


capacities = st.sampled_from([None, 0, 1, 2])


@given(programs(), st.integers(0, 999), capacities)
def test_simulation_over_free_links_equals_the_reference(
    program: Program, seed: int, capacity: int | None
):
    check(program, seed, None, capacity)


@given(st.data(), programs(), st.integers(0, 999), capacities)
def test_simulation_on_any_cluster_equals_the_reference(
    data: st.DataObject, program: Program, seed: int, capacity: int | None
):
    check(program, seed, data.draw(clusters(program.num_ranks)), capacity)
