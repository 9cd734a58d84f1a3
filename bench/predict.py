"""Predicted against measured: step time and peak bytes of plans on two ranks of this machine.

    python -m bench.predict [--json] [--quick]

Four models (a GPT whose products dominate, a small GPT, a convolutional network, a network of
unequal layers), each under several schedules, cuts and replicas.  A plan is predicted (every op
measured beside a companion, the link measured, the program simulated) before it is run.

error          predicted / measured - 1, of the median step of the slowest rank
bytes          of the rank that holds most
agreement      of all pairs of plans of one model whose measured times differ by more than 3 %,
               the share that the prediction puts in the right order
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from bench.machine import machine
from bench.zoo import JOBS
from penstock.cluster import Cluster
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.program.lower_plan import lower_plan, stages_of
from penstock.runtime.launch import run_processes
from penstock.runtime.links import measure_link
from penstock.runtime.run import run
from penstock.search import evaluate
from penstock.search.balance import balanced_cuts
from penstock.units import format_bytes, format_seconds

RANKS = 2
STEPS = 12


class Case(NamedTuple):
    name: str
    plan: Plan
    predicted_s: float
    predicted_bytes: tuple[int, ...]


def plans(captured: Capture, profile: Profile, job: Job) -> Iterator[tuple[str, Plan]]:
    """Yield plans of every kind that two ranks allow."""
    graph, count = captured.graph, job.micro_batches
    even = balanced_cuts(graph, profile.op_s, RANKS)
    early = (max(0, even[0] - max(1, len(graph.cut_points) // 6)),)
    clip = job.clip_norm is not None
    for schedule in ("gpipe", "one_f_one_b", "zb_h1"):
        yield schedule, plan_by_hand(graph, even, schedule, num_micro_batches=count, clip=clip)
    yield (
        "one_f_one_b, early cut",
        plan_by_hand(graph, early, "one_f_one_b", num_micro_batches=count, clip=clip),
    )
    yield (
        "one_f_one_b, recompute",
        plan_by_hand(
            graph, even, "one_f_one_b", num_micro_batches=count, recompute=(True, True), clip=clip
        ),
    )
    if len(graph.cut_points) >= 3:
        four = balanced_cuts(graph, profile.op_s, 2 * RANKS)
        yield (
            "interleaved",
            plan_by_hand(
                graph, four, "interleaved", num_micro_batches=count, num_ranks=RANKS, clip=clip
            ),
        )
    yield (
        "2 replicas",
        plan_by_hand(graph, (), "one_f_one_b", num_micro_batches=count // 2, replicas=2, clip=clip),
    )


def predict(name: str, captured: Capture, job: Job, cluster: Cluster) -> list[Case]:
    """Return the predictions of all plans of one model; nothing has been run yet."""
    profile = measure(captured, job, beside=RANKS - 1)
    cases: list[Case] = []
    for what, plan in plans(captured, profile, job):
        candidate, _ = evaluate(captured.graph, profile, cluster, plan)
        cases.append(Case(f"{name}: {what}", plan, candidate.step_s, candidate.peak_bytes))
    return cases


def rows_of(
    name: str, job: Job, cluster: Cluster, steps: int
) -> list[dict[str, float | int | str]]:
    """Return one row for each plan of one model."""
    captured = capture(job)
    rows: list[dict[str, float | int | str]] = []
    for case in predict(name, captured, job, cluster):
        outcome = run(
            lower_plan(case.plan, captured.graph),
            captured,
            stages_of(case.plan, captured.graph),
            job,
            num_steps=steps,
            launcher=run_processes,
        )
        measured = max(outcome.peak_bytes)
        rows.append(
            {
                "case": case.name,
                "predicted_s": case.predicted_s,
                "measured_s": outcome.step_s,
                "error": case.predicted_s / outcome.step_s - 1,
                "predicted_bytes": max(case.predicted_bytes),
                "measured_bytes": measured,
                "bytes_error": max(case.predicted_bytes) / measured - 1,
            }
        )
    return rows


def agreement(rows: list[dict[str, float | int | str]]) -> float:
    """Return the share of clearly different pairs that the prediction puts in the right order."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        same_model = str(a["case"]).split(":")[0] == str(b["case"]).split(":")[0]
        ratio = float(a["measured_s"]) / float(b["measured_s"])
        if same_model and not 1 / 1.03 < ratio < 1.03:
            pairs += 1
            right += (float(a["predicted_s"]) > float(b["predicted_s"])) == (ratio > 1)
    return right / pairs if pairs else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one model, few steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cluster = replace(Cluster.here(RANKS), inside=measure_link())
    jobs = dict(list(JOBS.items())[-1:]) if options.quick else JOBS
    rows = [
        row
        for name, job in jobs.items()
        for row in rows_of(name, job, cluster, 4 if options.quick else STEPS)
    ]
    summary = {
        "median_error": statistics.median(abs(float(row["error"])) for row in rows),
        "median_bytes_error": statistics.median(abs(float(row["bytes_error"])) for row in rows),
        "agreement": agreement(rows),
    }
    if options.json:
        print(json.dumps({"rows": rows, **summary, "machine": machine()}))
        return
    for row in rows:
        sizes = (format_bytes(int(row[key])) for key in ("predicted_bytes", "measured_bytes"))
        times = (format_seconds(float(row[key])) for key in ("predicted_s", "measured_s"))
        print(
            f"{row['case']:34} {' / '.join(times):22} {100 * float(row['error']):+6.1f} %   "
            f"{' / '.join(sizes):22} {100 * float(row['bytes_error']):+6.1f} %"
        )
    print({key: round(value, 4) for key, value in summary.items()}, machine())


if __name__ == "__main__":
    main()
