"""A run that never was: a program executed with known seconds, shown as the runtime shows one.

Written from what the runtime does, not from the simulator: threads take their calls in order, wait
for messages outside any span, and stay in a Send until it is over.  A reduction runs on a lane of
its rank, one after another, and an update waits until all are over.
"""

import random
from collections.abc import Callable
from typing import NamedTuple

from penstock.program.program import Compute, Program, Receive, Send, Update
from penstock.program.reductions import Reduction
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
        self.issued: list[list[tuple[Reduction, float]]] = [[] for _ in self.code]  # and not over
        self.summed_s = [0.0] * program.num_ranks  # when a rank's last sum was over

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
                if self.issued[rank]:
                    return False
                self.clock_s[rank] = max(self.clock_s[rank], self.summed_s[rank])
                self.take(rank, "update", "U", stage, step, self.truth.work(rank, "U", stage, step))
            case Receive(of, edge):
                self.unread.add((rank, edge, of.micro_batch))
            case Send(of, edge, peer):
                key = rank, peer, edge, of.micro_batch
                sending_s, way_s, _ = self.truth.message(*key)
                self.there_s[peer, edge, of.micro_batch] = self.clock_s[rank] + way_s
                self.take(rank, "send", *of, sending_s)
            case reduce if isinstance(reduce, Reduction):
                self.issued[rank].append((reduce, self.clock_s[rank]))
                self.meet()
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

    def meet(self) -> None:
        """Let all lanes go through their sums as far as their members have come to them."""
        firsts = [issued[0][0] for issued in self.issued if issued]
        for reduce in firsts:
            lanes = [self.issued[member] for member in reduce.ranks]
            if all(lane and lane[0][0] == reduce for lane in lanes):
                came_s = [max(self.issued[m].pop(0)[1], self.summed_s[m]) for m in reduce.ranks]
                for member, start_s in zip(reduce.ranks, came_s, strict=True):
                    over_s = max(came_s) + self.truth.sums(member, reduce.bucket, reduce.step)
                    self.summed_s[member] = over_s
                    where = "collective", "reduce", -1, reduce.step
                    self.spans.append(Span(member, *where, start_s, over_s))
                return self.meet()
