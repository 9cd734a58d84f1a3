"""Far memory: activations copied where an order needs it, beside copying all, and recompute.

    python -m bench.far_memory [--json] [--quick]

The GPT of examples/gpt.py on 4 ranks of this machine, a stage each, 8 micro-batches.  Every rank
may hold 0.8 of what the fullest rank of 1F1B takes.  Computes sleep, 0.6 seconds for a
micro-batch, shared among ops by their FLOP, so that two cores do for four ranks and their copies
(runtime/emulate.py); messages, copies and all that is held are real, and a copy is made to last as
long as `copy` says.  Runs of a few steps take turns.

copy       seconds of a copy of an activation, one way, in parts of the seconds of F of a stage
way        1F1B without the cap; with all activations copied between its computes, and beside them;
           the best plan that the search finds under the cap without copies, and with them
schedule, recomputed, copied   of the plan: schedule, stages that recompute, activations copied
fits       whether it is predicted to hold no more than the cap
peak_bytes, measured_bytes     of the fullest rank: predicted, and measured in steps that compute
predicted_s, step_s, low_s, high_s   of a step: predicted, median of the runs, least, most
ratio      of step_s to that of the plan with copies
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from bench.machine import machine
from penstock.cluster import Cluster, DeviceKind, Host, Link
from penstock.far import as_bytes
from penstock.graph.trace import Capture, capture
from penstock.job import Job, load_job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.program.program import Offload
from penstock.runtime.emulate import sleeping
from penstock.runtime.launch import run_processes
from penstock.runtime.windows import repeated
from penstock.runtime.worker import Task, work
from penstock.schedule.orders import F
from penstock.schedule.recipe import name_of
from penstock.search import Fixed, search
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.state.copies import FarFrames, Frame, Move
from penstock.units import format_bytes, format_seconds

RANKS, PART, MICRO_BATCH_S = 4, 0.8, 0.6
COPIES = (0.25, 0.5)  # of F
_ROOM = 10**12


class Setting(NamedTuple):
    """What all plans are made for, and run with."""

    captured: Capture
    job: Job
    profile: Profile  # of the emulated computes and copies

    def cluster(self, memory_bytes: int, cores: int) -> Cluster:
        kind = DeviceKind(self.profile.basis.device, memory_bytes, (), 1.0)
        host = Host("here", kind.name, RANKS, cores=cores)
        return Cluster((kind,), (host,), inside=Link(1e-4, 2e9))


def setting(captured: Capture, job: Job, measured: Profile, copy: float) -> Setting:
    """Return the setting of runs with copies of `copy` times the seconds of F of a stage."""
    flop = [node.flop for node in captured.graph.nodes]
    slow = replace(measured, op_s=tuple(MICRO_BATCH_S * each / sum(flop) for each in flop))
    made = Setting(captured, job, slow)
    bare = by_hand(made, slow)
    priced = Judge(captured.graph, slow, made.cluster(_ROOM, RANKS)).price(
        bare.changed(offload=("activations",) * RANKS)
    )
    forward_s, copied = priced.costs.action_s[F], priced.held[0].copied
    assert copied is not None, "they are asked for"
    far_s = copy * float(forward_s.sum()) / int(copied[0, 0].sum())
    copying = replace(slow.copying, far_s_per_byte=far_s)
    return made._replace(profile=replace(slow, copying=copying))


def by_hand(made: Setting, profile: Profile) -> Plan:
    graph = made.captured.graph
    cuts = balanced_cuts(graph, profile.op_s, RANKS)
    count = made.job.micro_batches
    return plan_by_hand(graph, cuts, "one_f_one_b", num_micro_batches=count, clip=clips(made.job))


def clips(job: Job) -> bool:
    return job.clip_norm is not None


def ways(made: Setting) -> tuple[int, dict[str, Plan]]:
    """Return the cap in bytes, and the plans."""
    graph, profile = made.captured.graph, made.profile
    plain = by_hand(made, profile)
    judge = Judge(graph, profile, made.cluster(_ROOM, 2 * RANKS))
    cap = int(PART * max(judge.candidate(plain).peak_bytes))
    fixed = Fixed(ranks=RANKS, replicas=1, stages=RANKS)
    found = {
        way: search(
            graph,
            profile,
            made.cluster(cap, cores),
            micro_batches=made.job.micro_batches,
            clip=clips(made.job),
            fixed=fixed,
        ).plan
        for way, cores in (("best without copies", RANKS), ("best", 2 * RANKS))
    }
    between = plain.changed(offload=("activations",) * RANKS)
    copied = {"1F1B, copied": between, "1F1B, beside": between.changed(beside=True)}
    return cap, {"1F1B": plain, **copied, **found}


# -- runs -----------------------------------------------------------------------------------------


def lasting(
    made: Callable[..., Move], size_of: Callable[..., int], s_per_byte: float
) -> Callable[..., Move]:
    """Return `made` with copies that last so many seconds a byte at least."""

    def wrapped(frames: FarFrames, number: int, frame: Frame) -> Move:
        seconds = s_per_byte * size_of(frames, number, frame)
        move = made(frames, number, frame)

        def copy() -> None:
            until = time.perf_counter() + seconds
            move.copy()
            time.sleep(max(0.0, until - time.perf_counter()))

        return Move(copy, move.end)

    return wrapped


def _near_bytes(frames: FarFrames, number: int, frame: Frame) -> int:
    firsts = (next((v for v in group if v in frame), None) for group in frames.groups)
    return sum(len(as_bytes(frame[value])) for value in firsts if value is not None)


def _far_bytes(frames: FarFrames, number: int, frame: Frame) -> int:
    return sum(frames.away[number].room.sizes)


def told(made: Setting, plan: Plan, steps: int, *, asleep: bool) -> list[Any]:
    """Return the figures of a run's ranks."""
    captured, each_s = made.captured, made.profile.copying.far_s_per_byte
    program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
    task = Task(captured, stages, made.job, repeated(program, range(steps)))
    if not asleep:
        task = replace(task, memory_window=1)
        return run_processes(partial(work, task), RANKS, lambda step: None, groups=task.groups)
    job, function_of = sleeping(made.job, made.profile)
    task = task.remade(job=job, function_of=function_of)
    there = lasting(FarFrames.offload, _near_bytes, each_s)
    back = lasting(FarFrames.reload, _far_bytes, each_s)
    with patch.object(FarFrames, "offload", there), patch.object(FarFrames, "reload", back):
        return run_processes(partial(work, task), RANKS, lambda step: None, groups=task.groups)


def step_s(made: Setting, plan: Plan, steps: int) -> float:
    """Return the seconds of a step, the first one aside."""
    found = told(made, plan, steps, asleep=True)
    return max(statistics.fmean(each.window_s[1:]) for each in found)


def rows(made: Setting, copy: float, steps: int, rounds: int) -> Iterator[dict[str, Any]]:
    cap, plans = ways(made)
    judge = Judge(made.captured.graph, made.profile, made.cluster(_ROOM, 2 * RANKS))
    runs: dict[str, list[float]] = {way: [] for way in plans}
    for number in range(rounds):
        for way, plan in list(plans.items())[:: 1 if number % 2 == 0 else -1]:
            runs[way].append(step_s(made, plan, steps))
    best_s = statistics.median(runs["best"])
    for way, plan in plans.items():
        candidate, own_s = judge.candidate(plan), statistics.median(runs[way])
        peak = max(candidate.peak_bytes)
        program = lower_plan(plan, made.captured.graph)
        yield {
            "copy": copy,
            "way": way,
            "schedule": name_of(plan.schedule),
            "recomputed": sum(map(bool, plan.recompute)),
            "copied": sum(isinstance(one, Offload) for code in program.code for one in code),
            "cap_bytes": cap,
            "fits": peak <= cap,
            "peak_bytes": peak,
            "measured_bytes": max(each.peak_bytes for each in told(made, plan, 2, asleep=False)),
            "predicted_s": candidate.step_s,
            "step_s": own_s,
            "low_s": min(runs[way]),
            "high_s": max(runs[way]),
            "ratio": own_s / best_s,
        }


def shown(row: dict[str, Any]) -> str:
    plan = f"{row['schedule']}, {row['recomputed']} recomputed, {row['copied']} copied"
    held = f"{format_bytes(row['peak_bytes'])} / {format_bytes(row['measured_bytes'])}"
    spread = f"{format_seconds(row['low_s'])} - {format_seconds(row['high_s'])}"
    took = f"{format_seconds(row['predicted_s'])} / {format_seconds(row['step_s'])} ({spread})"
    fits = "fits" if row["fits"] else "too much"
    left = f"{row['copy']:<5} {row['way']:<20} {plan:<42} {held:<20} {fits:<9}"
    return f"{left} {took} {row['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--quick", action="store_true", help="one speed of copies, one run of each")
    given = parser.parse_args()
    job = load_job("examples/gpt.py")
    captured = capture(replace(job, clip_norm=None))
    measured, found = measure(captured, job, beside=0), list[dict[str, Any]]()
    steps, rounds, speeds = (3, 1, COPIES[:1]) if given.quick else (4, 3, COPIES)
    for copy in speeds:
        for row in rows(setting(captured, job, measured, copy), copy, steps, rounds):
            found.append(row)
            if not given.json:
                print(shown(row), flush=True)
    if given.json:
        print(json.dumps({"machine": machine(), "rows": found}))


if __name__ == "__main__":
    main()
