"""Play: plans of one model run by turns on the same ranks, in rounds of a random, seeded order.

A block is some steps of one plan, one right after the other, as in training; the first of them is
not counted.  A step lasts from the end of the one before it to its own end, on the slowest rank.
"""

import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.measure import busy_s
from penstock import _compat
from penstock.cli import face
from penstock.graph.code import function_of
from penstock.graph.fused_runs import fused_function_of
from penstock.graph.split import split
from penstock.graph.trace import Capture
from penstock.heap import keep_freed_memory
from penstock.job import Job
from penstock.plan import Plan
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.collects import own_capture
from penstock.runtime.rank import Rank
from penstock.runtime.rank_terms import RankTerms
from penstock.transport import Transport


class Traced(NamedTuple):
    """A job with so many of its micro-batches joined, and its trace."""

    job: Job
    captured: Capture


class Rounds(NamedTuple):
    """How often plans take turns, and how long a turn is."""

    turns: int = 3
    block_s: float = 0.3
    least: int = 3  # steps of a block
    ahead: bool = False  # of all other programs during a block, and a pause as long after it
    seed: int = 0


class Block(NamedTuple):
    """One turn of a plan: seconds of a step, and cores that other processes had meanwhile."""

    step_s: float
    other: float


class Played(NamedTuple):
    """What a plan took: its blocks, and the bytes of the rank that holds most."""

    blocks: list[Block]
    peak_bytes: int


def play(
    traced: dict[int, Traced],
    plans: Sequence[Plan],
    end_of: Callable[[int], Transport],
    rounds: Rounds,
) -> list[Played]:
    """Return the figures of each plan; every rank calls it with the same plans.

    end_of:  makes this rank's end for a plan, by its number.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    ends = [end_of(number) for number in range(len(plans))]
    done, total = 0, len(plans) * (rounds.turns + 1)
    with face.progress("running plans") as update:
        sides: list[_Side] = []
        for plan, end in zip(plans, ends, strict=True):
            sides.append(_Side(traced[plan.terms.joined], plan, end, rounds))
            done += 1
            update(done, total)
        blocks: list[list[Block]] = [[] for _ in plans]
        for number in range(rounds.turns):
            order = list(range(len(plans)))
            random.Random(f"{rounds.seed} {number}").shuffle(order)
            for place in order:
                blocks[place].append(sides[place].block())
                done += 1
                update(done, total)
    peaks = [max(_told(side.end, side.peak_bytes)) for side in sides]
    return [Played(*each) for each in zip(blocks, peaks, strict=True)]


class _Side:
    """One plan on one rank: bound, two steps run, the second of them under the profiler."""

    def __init__(self, traced: Traced, plan: Plan, end: Transport, rounds: Rounds) -> None:
        captured = split(traced.captured, dict(plan.terms.split))
        program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
        captured = own_capture(captured, program, end.rank)
        self.end, self.step, self.ahead = end, 0, rounds.ahead
        make = partial(fused_function_of, folder=None) if plan.terms.compiled else function_of
        self.rank = Rank(captured, stages, traced.job, end, RankTerms(make=make))
        self.rank.expect(program)
        self.calls = self.rank.bind(program)
        end.barrier()
        self.run()
        with _compat.memory_profile() as memory:
            self.run()
        self.peak_bytes = _peak(self.rank.held_bytes(), [event.size_bytes for event in memory()])
        start = time.perf_counter()
        self.run()
        step_s = _told(end, time.perf_counter() - start)[0]
        self.count = max(rounds.least, round(rounds.block_s / step_s))

    def run(self) -> None:
        with torch.no_grad():
            self.rank.run(self.calls, self.step)
        self.step += 1

    def block(self) -> Block:
        """Run one turn."""
        with ahead(self.ahead):
            return self._block()

    def _block(self) -> Block:
        self.end.barrier()
        busy, cpu, began = busy_s(), time.process_time(), time.perf_counter()
        times: list[float] = []
        for _ in range(1 + self.count):
            self.run()
            times.append(time.perf_counter())
        self.end.barrier()
        wall = time.perf_counter() - began
        told = _told(self.end, [times, time.process_time() - cpu, busy_s() - busy])
        latest = [max(row) for row in zip(*(each[0] for each in told), strict=True)]
        steps = [after - before for before, after in itertools.pairwise(latest)]
        other = (told[0][2] - sum(each[1] for each in told)) / wall
        return Block(statistics.median(steps), max(0.0, other))


@contextmanager
def ahead(wanted: bool = True) -> Generator[None]:
    """Let all threads of this process, and those it starts, run before those of other programs.

    It pauses as long afterwards, so that others get half of the time.
    """
    began = time.perf_counter()
    try:
        if wanted:
            _schedule(os.SCHED_FIFO, 1)
        yield
    finally:
        if wanted:
            _schedule(os.SCHED_OTHER, 0)
            time.sleep(time.perf_counter() - began)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def _peak(held_after: int, changes: Sequence[int]) -> int:
    """Return the most bytes held, from what is held after all changes."""
    now = peak = held_after - sum(changes)
    for change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _told(end: Transport, own: object) -> list[Any]:
    everyone = tuple(range(end.num_ranks))
    return list(map(json.loads, end.all_gather_bytes(json.dumps(own).encode(), everyone)))
