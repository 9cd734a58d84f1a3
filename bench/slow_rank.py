"""Slow rank: ways to agree where ranks are not alike, or one is late now and then.

    python -m bench.agree --slow [--json]

A small job whose forward sleeps, four ranks as processes of this host, one micro-batch a rank and
step, so that the clock tells of waiting and not of cores.

case                  even: 50 ms a step; one slow: the last rank takes 150 ms; now and then:
                      each rank and step by a chance of 1 / 8 200 ms, drawn with a seed
gradients_per_s       micro-batches a second whose gradients are taken, while all ranks are at work
predicted_gradients_per_s   by simulate/server_steps.py of the seconds that are slept; of None the
                      mean of each step's slowest
"""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.convex import job_of
from penstock.checkpoints.saver import SavePolicy
from penstock.graph.code import Function, function_of
from penstock.graph.trace import capture
from penstock.plan import plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.calls import StepResult
from penstock.runtime.launch import run_processes
from penstock.runtime.run import windows_of
from penstock.runtime.worker import Task, work
from penstock.simulate.server_steps import ServerSeconds, served_step_s
from penstock.sums import sums_way

WAYS = (None, "backup:1", "ssp:0", "ssp:3", "ssp:8", "async")
Seconds = NDArray[np.float64]  # [rank, step]
Row = dict[str, Any]


def cases(ranks: int, steps: int) -> dict[str, Seconds]:
    """Return what each rank sleeps in each of its steps."""
    even = np.full((ranks, steps), 0.05)
    slow, seldom = even.copy(), even.copy()
    slow[-1] = 0.15
    seldom[np.random.default_rng(1).random(even.shape) < 1 / 8] = 0.2
    return {"even": even, "one slow": slow, "now and then": seldom}


def _sleeping(row: Seconds, segment: Any, captured: Any, *, asks: bool = False) -> Function:
    """Return a segment's function, that sleeps in forward for what its rank does."""
    made, own = function_of(segment, captured, asks=asks), iter(row)
    if segment.kind != "F":
        return made

    def run(given: list[Any], seed: int) -> Any:
        time.sleep(float(next(own)))
        return made.run(given, seed)

    return replace(made, run=run)


def _live(task: Task, seconds: Seconds, end: Any, tell: Any) -> Any:
    """Be a rank that sleeps, and tells who it is."""

    def told(result: StepResult) -> None:
        tell(replace(result, figures={"rank": end.rank}))

    slow = partial(_sleeping, seconds[end.rank])
    return work(replace(task, function_of=slow, functions={}), end, told)


def measured(way: str | None, seconds: Seconds) -> float:
    """Return the gradients that are taken in a second."""
    ranks, steps = seconds.shape
    job = job_of(way, ranks)
    captured = capture(job)
    plan = plan_by_hand(captured.graph, [], "gpipe", num_micro_batches=1, replicas=ranks)
    plan = plan.changed(sums=way)
    program, heard = lower_plan(plan, captured.graph), list[tuple[float, int, int]]()

    def tell(result: StepResult) -> None:
        if not result.left_out:
            heard.append((time.perf_counter(), result.step, int(result.figures["rank"])))

    with tempfile.TemporaryDirectory() as folder:
        policy, stages = SavePolicy(Path(folder)), stages_of(plan, captured.graph)
        task = Task(captured, stages, job, windows_of(program, steps), policy=policy)
        run_processes(partial(_live, task, seconds), ranks, tell, groups=task.groups)
    taken = ranks - int(sums_way(way).amount) if sums_way(way).kind == "backup" else ranks
    if way is None or taken < ranks:  # each step once, when the first rank is over with it
        first = {step: at_s for at_s, step, _ in reversed(heard)}
        return _rate([first[step] for step in sorted(first)]) * taken
    done = next(at_s for at_s, step, _ in heard if step == steps - 1)
    return _rate([at_s for at_s, _, _ in heard if at_s <= done])


def _rate(ends_s: list[float]) -> float:
    first = len(ends_s) // 4
    return (len(ends_s) - 1 - first) / (ends_s[-1] - ends_s[first])


def predicted(way: str | None, seconds: Seconds) -> float:
    """Return likewise what the simulator says of a server that takes no time."""
    ranks = len(seconds)
    if way is None:
        return ranks / seconds[:, seconds.shape[1] // 4 :].max(axis=0).mean()
    own = sums_way(way)
    step_s = served_step_s(own, seconds, [ServerSeconds((0.0,) * ranks, 0.0)])
    return (ranks - int(own.amount) if own.kind == "backup" else ranks) / step_s


def rows(ranks: int, steps: int) -> Iterator[Row]:
    for case, seconds in cases(ranks, steps).items():
        for way in WAYS:
            found, wanted = measured(way, seconds), predicted(way, seconds)
            told: Row = {"case": case, "ranks": ranks, "way": str(way), "gradients_per_s": found}
            yield {**told, "predicted_gradients_per_s": wanted, "error": wanted / found - 1}
