"""Post-validation: what clipping by the global norm costs a zero bubble, done before and after.

    python -m bench.post_validation [--json] [--quick]

The small GPT of bench/models.py on 4 ranks of this machine, each of its computes made to last
10 ms, so that two cores do for four ranks; ZB-H2, 8 micro-batches, AdamW.  Runs of 50 steps take
turns.

clips      in how many of the steps the gradients have to be clipped: none, all, or about one of ten
how        no clipping at all; before the update; after it (post-validation)
step_s     seconds of a step, of the slowest rank: median of the runs
low_s, high_s   of the runs
ratio      to no clipping
floor_s    computes of a rank in a step
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from bench.machine import machine
from bench.models import TINY
from penstock.graph.code import Function, function_of
from penstock.graph.stages import Segment
from penstock.graph.trace import Capture, build_model, capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.runtime.launch import run_processes
from penstock.runtime.windows import repeated
from penstock.runtime.worker import Task, work

RANKS, MICRO_BATCHES, COMPUTE_S = 4, 8, 0.01
NEVER = 1e6


class Side(NamedTuple):
    """One way of clipping: how, and the norm; None: not at all."""

    clips: str
    how: str
    norm: float | None


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def slow(segment: Segment, captured: Capture, *, asks: bool = False) -> Function:
    """Return the function of a segment, which lasts COMPUTE_S at least."""
    function = function_of(segment, captured, asks=asks)

    def run(given: list[Any], seed: int) -> tuple[Any, ...]:
        until = time.perf_counter() + COMPUTE_S
        results = function.run(given, seed)
        time.sleep(max(0.0, until - time.perf_counter()))
        return results

    return replace(function, run=run)


def job_of() -> Job:
    return replace(TINY.job(), optimizer=adamw)


def norms(job: Job, steps: int) -> list[float]:
    """Return the norm of the gradient of each step of a plain loop that clips nothing."""
    model, found = build_model(job), list[float]()
    optimizer = job.optimizer(model.parameters())
    batches = job.data(0)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            (job.loss(model, next(batches)) / MICRO_BATCHES).backward()
        found.append(float(nn.utils.clip_grad_norm_(model.parameters(), NEVER)))
        optimizer.step()
    return found


def sides(job: Job, steps: int) -> Iterator[Side]:
    found = sorted(norms(job, steps))
    yield Side("none", "no clipping", None)
    for clips, norm in (("none", NEVER), ("all", 1e-3), ("some", found[-max(1, steps // 10)])):
        yield Side(clips, "before", norm)
        yield Side(clips, "after", norm)


def plan_of(captured: Capture, side: Side) -> Plan:
    names = [point.name for point in captured.graph.cut_points]
    cuts = [names.index(f"after pieces.{stage[-1]}") for stage in TINY.pieces_of(RANKS)[:-1]]
    options = {"clip": side.norm is not None, "post_validation": side.how == "after"}
    plan = plan_by_hand(captured.graph, cuts, "zb_h2", num_micro_batches=MICRO_BATCHES)
    return plan.changed(**options)


def step_s(captured: Capture, side: Side, steps: int) -> float:
    """Return the seconds of a step of a run, its first steps aside."""
    plan = plan_of(captured, side)
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    job = replace(job_of(), clip_norm=side.norm)
    task = Task(captured, stages, job, repeated(program, range(steps)), function_of=slow)
    told = run_processes(partial(work, task), RANKS, lambda step: None, groups=task.groups)
    return max(statistics.fmean(result.window_s[1:]) for result in told)


def rows(steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    job = job_of()
    captured, ways = capture(replace(job, clip_norm=None)), tuple(sides(job, steps))
    found: dict[Side, list[float]] = {side: [] for side in ways}
    for number in range(rounds):
        for side in ways[:: 1 if number % 2 == 0 else -1]:
            found[side].append(step_s(captured, side, steps))
    free_s = statistics.median(found[ways[0]])
    for side, runs in found.items():
        own_s = statistics.median(runs)
        yield {
            **side._asdict(),
            "step_s": own_s,
            "low_s": min(runs),
            "high_s": max(runs),
            "ratio": own_s / free_s,
            "floor_s": 3 * MICRO_BATCHES * COMPUTE_S,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="20 steps, one run of each")
    given = parser.parse_args()
    found = list(rows(*((20, 1) if given.quick else (50, 3))))
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found}))
        return
    floor = f"floor {found[0]['floor_s'] * 1e3:.0f} ms"
    print(f"{'clips':<6}{'how':<13}{'step':>9}{'of runs':>17}{'ratio':>8}   {floor}")
    for row in found:
        spread = f"{row['low_s'] * 1e3:.1f} - {row['high_s'] * 1e3:.1f}"
        own = f"{row['step_s'] * 1e3:>6.1f} ms{spread:>17}{row['ratio']:>8.3f}"
        print(f"{row['clips']:<6}{row['how']:<13}{own}")


if __name__ == "__main__":
    main()
