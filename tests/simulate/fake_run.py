"""A run that never was: a program executed with known seconds, shown as the runtime shows one.

Written from what the runtime does, not from the simulator: threads take their calls in order, wait
for messages outside any span, and stay in a Send or a Reduce until it is over.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from penstock.program.program import Compute, Program, Receive, Reduce, Send, Update
from penstock.timeline import Span, Timeline


class Truth(NamedTuple):
    """Seconds of what a rank does.

    work:     (rank, kind, stage, micro-batch or step)
    message:  (sender, reader, edge, micro-batch) -> sending, under way, reading
    sums:     (rank, bucket, step): from when the last member came
    """

    work: Callable[[int, str, int, int], float]
    message: Callable[[int, int, int, int], tuple[float, float, float]]
    sums: Callable[[int, str, int], float]


def drawn(seed: int, *key: object) -> float:
    """Return seconds from 0.01 to 1.01 that belong to `key`."""
    return random.Random(f"{seed} {key}").random() + 0.01


def jittery(seed: int) -> Truth:
    """Return seconds of which no two are alike."""
    return Truth(
        lambda *key: drawn(seed, *key),
        lambda *key: tuple(drawn(seed, *key, part) / 3 for part in range(3)),
        lambda *key: drawn(seed, *key),
    )


def plain(seed: int, way_s: float = 0.25) -> Truth:
    """Return seconds of which no two computes are alike, and messages that nobody reads out."""
    return jittery(seed)._replace(message=lambda *key: (way_s, way_s, 0.0))


def fake_run(program: Program, truth: Truth) -> Timeline:
    """Return what the runtime would show of one window."""
    run = _FakeRun(program, truth)
    while any(run.advance(rank) for rank in range(program.num_ranks)):
        pass
    assert run.at == [len(code) for code in program.code]
    return Timeline.of(program.num_ranks, run.spans, meta=(("clock", "measured"),))


class _FakeRun:
    def __init__(self, program: Program, truth: Truth) -> None:
        self.program, self.truth = program, truth
        self.code = list(program.code)
        self.at = [0] * program.num_ranks
        self.clock_s = [0.0] * program.num_ranks
        self.spans: list[Span] = []
        self.there_s: dict[tuple[int, int, int], float] = {}  # by reader, edge and micro-batch
        self.unread: set[tuple[int, int, int]] = set()

    def advance(self, rank: int) -> bool:
        """Do the next thing of a rank; return whether it could be done."""
        if self.at[rank] == len(self.code[rank]):
            return False
        match self.code[rank][self.at[rank]]:
            case Compute(action):
                if not self.read(rank, action):
                    return False
                self.take(rank, "compute", *action, self.truth.work(rank, *action))
            case Update(stage, step):
                self.take(rank, "update", "U", stage, step, self.truth.work(rank, "U", stage, step))
            case Receive(of, edge):
                self.unread.add((rank, edge, of.micro_batch))
            case Send(of, edge, peer):
                key = rank, peer, edge, of.micro_batch
                sending_s, way_s, _ = self.truth.message(*key)
                self.there_s[peer, edge, of.micro_batch] = self.clock_s[rank] + way_s
                self.take(rank, "send", *of, sending_s)
            case Reduce() as reduce:
                return self.meet(reduce)
        self.at[rank] += 1
        return True

    def take(self, rank, lane, kind, stage, number, seconds: float) -> None:
        start_s = self.clock_s[rank]
        self.clock_s[rank] += seconds
        self.spans.append(Span(rank, lane, kind, stage, number, start_s, self.clock_s[rank]))

    def read(self, rank: int, action) -> bool:
        """Wait for the messages of a compute and copy them out, if they are on their way."""
        kind, stage, micro_batch = action
        edges = [
            number
            for number, edge in enumerate(self.program.edges)
            if edge.target == stage and (edge.kind == "F") == (kind == "F") and kind != "W"
        ]
        keys = [(rank, edge, micro_batch) for edge in edges]
        keys = [key for key in keys if key in self.unread]
        if any(key not in self.there_s for key in keys):
            return False
        self.clock_s[rank] = max([self.clock_s[rank], *(self.there_s[key] for key in keys)])
        for key in keys:
            self.unread.remove(key)
            home = self.home(rank, key[1], micro_batch)
            self.clock_s[rank] += self.truth.message(home, *key)[2]
        return True

    def home(self, rank: int, edge: int, micro_batch: int) -> int:
        """Return who sent a message."""
        for instruction in self.code[rank]:
            match instruction:
                case Receive(of, number, peer) if (number, of.micro_batch) == (edge, micro_batch):
                    return peer
        raise AssertionError(edge)

    def meet(self, reduce: Reduce) -> bool:
        """Let all members go through a Reduce, if all have come to it."""
        for member in reduce.ranks:
            here = self.code[member][self.at[member] : self.at[member] + 1]
            if here != (reduce,):
                return False
        last_s = max(self.clock_s[member] for member in reduce.ranks)
        for member in reduce.ranks:
            taken_s = self.truth.sums(member, reduce.bucket, reduce.step)
            until_s = last_s + taken_s - self.clock_s[member]
            self.take(member, "collective", "reduce", -1, reduce.step, until_s)
            self.at[member] += 1
        return True
