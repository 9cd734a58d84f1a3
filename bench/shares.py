"""Unequal shares, parts and turns beside even ones, on ranks of which some are slower.

    python -m bench.shares [--json] [--quick] [--rounds N] [--ahead]

The GPT of bench/models.py, narrower and on shorter windows, AdamW, twelve micro-batches a step;
both plans run by turns, each a run of its own in forked processes.  Ranks are slowed in two ways:

sleep   every rank sleeps for the profiled seconds, the slow one for as many times more; messages,
        sums and bytes are real, so that there may be more ranks than cores
busy    two ranks, each pinned to a core; a process that only computes shares the core of rank 1

way     shares: replicas; even_s: as many micro-batches each; ours: as the search shares them
        parts:  shares, and stages in shards, of which the fast rank keeps less than half, as it has
                the memory for 0.55 of a replica; even_s: equal parts and shares, which need more
        turns:  the first of two stages on two ranks, one of them slow; even_s: in equal turns

even_s, ours_s      seconds of a step, the median of the rounds' medians
ratio               even_s / ours_s: the median of the rounds' ratios; low, high: their range
predicted_s         of ours, and predicted_ratio of both, by the simulator, from ops measured here
                    and the factor
peak_bytes          of each rank, as measured; predicted_bytes: as predicted; room_bytes: the caps
plan                what the search found
"""

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.beside import adamw
from bench.machine import machine
from bench.models import GPT
from bench.replan import ahead
from penstock.cli import face
from penstock.cluster import Cluster, Link
from penstock.gauge.links import measure_link
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.pilot.slow_ranks import Slowed, slowed
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import Report, run_processes
from penstock.runtime.run import Outcome, Steps, outcome_of, windows_of
from penstock.runtime.worker import RankResult, Task, work
from penstock.search import Fixed, evaluate
from penstock.search.search import search
from penstock.transport import Transport
from penstock.units import format_seconds

SMALL = replace(GPT, width=192, window=64)
MICRO_BATCHES, STEPS, ROUNDS = 12, 8, 5
SHORT = 0.55
EVEN_TURNS = "dapple(policy=A, ranks=2-1)"
Row = dict[str, Any]


class Case(NamedTuple):
    """One row: by how much each rank is slower, how, and what is not even."""

    factors: tuple[float, ...]
    how: str
    way: str


CASES = (
    Case((1, 2), "sleep", "shares"),
    Case((1, 2), "sleep", "parts"),
    Case((1, 2, 1), "sleep", "turns"),
    Case((1, 1, 3, 3), "sleep", "shares"),
    Case((1, 2), "busy", "shares"),
    Case((1, 2), "busy", "parts"),
)


class Known(NamedTuple):
    """What plans are made from."""

    job: Job
    captured: Capture
    profile: Profile
    link: Link

    def there(self, factors: Sequence[float]) -> Slowed:
        here = Cluster.here(len(factors))
        host = replace(here.hosts[0], cores=0)
        return slowed(replace(here, hosts=(host,), inside=self.link), factors)

    def profiles(self, there: Slowed) -> tuple[Profile, ...]:
        return there.profiles([replace(self.profile, kind=there.kinds[0][1])])


class Pair(NamedTuple):
    """Two plans, what is predicted of them, and the bytes that ranks may hold."""

    even: Plan
    ours: Plan
    predicted_s: float
    predicted_ratio: float
    predicted_bytes: tuple[int, ...]
    room_bytes: tuple[int, ...]


def pair_of(known: Known, case: Case) -> Pair:
    """Return the even plan of a case, and the one that is searched for."""
    graph, there = known.captured.graph, known.there(case.factors)
    profiles, ranks = known.profiles(there), len(case.factors)
    cluster, caps = there.cluster, tuple[int, ...]()
    if case.way == "turns":
        even = _found(known, there, Fixed(ranks=ranks, replicas=1, schedule=EVEN_TURNS))
        even = even.changed(schedule=EVEN_TURNS)
        ours = _found(known, there, Fixed(ranks=ranks, replicas=1, stages=2))
    else:
        each = MICRO_BATCHES // ranks
        even = plan_by_hand(graph, (), "one_f_one_b", num_micro_batches=each, replicas=ranks)
        fixed = Fixed(ranks=ranks, replicas=ranks)
        if case.way == "parts":
            held = evaluate(graph, profiles, cluster, even)[0].peak_bytes
            caps = int(SHORT * held[0]), *held[1:]
        ours = _found(known, there._replace(cluster=cluster.within(caps or None)), fixed)
        if case.way == "parts":
            even = ours.changed(parts=(), shares=(), num_micro_batches=each)
    alike, own = (evaluate(graph, profiles, cluster, plan)[0] for plan in (even, ours))
    return Pair(even, ours, own.step_s, alike.step_s / own.step_s, own.peak_bytes, caps)


def _found(known: Known, there: Slowed, fixed: Fixed) -> Plan:
    given = known.captured.graph, known.profiles(there), there.cluster
    return search(*given, micro_batches=MICRO_BATCHES, fixed=fixed).plan


# -- runs ------------------------------------------------------------------------------------------


def ran(known: Known, plan: Plan, case: Case, steps: int) -> Outcome:
    """Return a run of a plan, its ranks slowed as the case says."""
    program, stages = lower_plan(plan, known.captured.graph), stages_of(plan, known.captured.graph)
    windows = windows_of(program, steps)
    plain = Task(known.captured, stages, known.job, windows, memory_window=windows.count(2) - 1)
    tasks = [plain] * program.num_ranks
    if case.how == "sleep":
        there = known.there(case.factors)
        by_kind = {each.kind: each for each in known.profiles(there)}
        names = [there.cluster.device_of(rank).name for rank in range(program.num_ranks)]
        made = [sleeping(known.job, by_kind[name]) for name in names]
        tasks = [replace(plain, job=job, function_of=make) for job, make in made]
    losses = Steps(program.grid.step_micro_batches)
    work_of = partial(_work, tasks, case.how == "busy")
    with neighbour() if case.how == "busy" else nullcontext():
        found = run_processes(work_of, program.num_ranks, losses.add, groups=plain.groups)
    return outcome_of(found, losses, {})


def _work(tasks: Sequence[Task], pins: bool, end: Transport, report: Report) -> RankResult:
    if pins:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[end.rank % len(cores)]})
    return work(tasks[end.rank], end, report)


@contextmanager
def neighbour() -> Generator[None]:
    """Let a process compute on the core of rank 1."""
    cores = sorted(os.sched_getaffinity(0))
    process = multiprocessing.get_context("fork").Process(
        target=_burn, args=(cores[1 % len(cores)],)
    )
    process.start()
    try:
        yield
    finally:
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()


def _burn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def row_of(known: Known, case: Case, rounds: int, steps: int) -> Row:
    """Return the row of a case."""
    pair = pair_of(known, case)
    turns = [[ran(known, plan, case, steps) for plan in pair[:2]] for _ in range(rounds)]
    times = [[outcome.step_s for outcome in turn] for turn in turns]
    ratios = [even / ours for even, ours in times]
    return {
        "model": GPT.name,
        "ranks": len(case.factors),
        "slowed": f"{' '.join(f'{f:g}' for f in case.factors)} {case.how}",
        "way": case.way,
        "even_s": statistics.median(even for even, _ in times),
        "ours_s": statistics.median(ours for _, ours in times),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "predicted_s": pair.predicted_s,
        "predicted_ratio": pair.predicted_ratio,
        "peak_bytes": list(turns[-1][1].peak_bytes),
        "predicted_bytes": list(pair.predicted_bytes),
        "room_bytes": list(pair.room_bytes),
        "plan": words(pair.ours),
    }


def words(plan: Plan) -> str:
    """Return a plan in words, its uneven parts included."""
    told = str(plan).splitlines()[0].partition(": ")[2]
    return told + (f", parts {' + '.join(map(str, plan.place.parts))}" if plan.place.parts else "")


def line(row: Row) -> str:
    even, ours = (format_seconds(row[key]) for key in ("even_s", "ours_s"))
    pairs = zip(row["peak_bytes"], row["predicted_bytes"], strict=True)
    off = max(abs(peak / predicted - 1) for peak, predicted in pairs)
    return (
        f"{row['slowed']:14} {row['way']:6} {even} -> {ours}, {row['ratio']:.2f} "
        f"({row['low']:.2f} to {row['high']:.2f}), predicted {format_seconds(row['predicted_s'])}, "
        f"{row['predicted_ratio']:.2f}; "
        f"bytes off by {off:.2%}; {row['plan']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--ahead", action="store_true", help="on a machine in use (as root)")
    options = parser.parse_args()
    rounds, steps = (1, 4) if options.quick else (options.rounds, STEPS)
    torch.set_num_threads(1)
    known = known_of()
    rows: list[Row] = []
    for case in CASES:
        if case.how == "busy" and len(os.sched_getaffinity(0)) < len(case.factors):
            print("a busy neighbour needs two cores", file=sys.stderr)
            continue
        with ahead() if options.ahead else nullcontext():
            rows.append(row_of(known, case, rounds, steps))
        if not options.json:
            face.show(line(rows[-1]))
    if options.json:
        print(json.dumps({"rows": rows, "machine": machine()}))


def known_of() -> Known:
    """Return the job, traced and measured."""
    job = replace(SMALL.job(), optimizer=adamw, micro_batches=MICRO_BATCHES)
    captured = capture(job)
    face.say("measuring every op, and the link")
    return Known(job, captured, measure(captured, job, beside=1), measure_link())


if __name__ == "__main__":
    main()
