"""Woven: collects of one micro-batch beside the computes of another, over a slow line.

    python -m bench.woven [--json] [--quick] [--rounds N] [--rates B/S ...] [--models NAME ...]

A model of bench/zoo.py whose ops two ranks divide, one at each end of a line (bench/network.py)
over gloo, each micro-batch in two halves; by gpipe and by 1F1B, units of one half after the other
(what a plan without it does) and of both in turn.  The plans take turns.  The line is measured as
`penstock doctor --links` does it, ops as a profile.

order             of units
measured_s        a step: median over the turns, lowest and highest
predicted_s       by the simulator
speedup, predicted_speedup    against the same schedule, one after the other
peak_bytes, predicted_bytes   of the rank that holds most
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from bench.line import cluster_over, played_over
from bench.machine import machine
from bench.network import can_throttle, line
from bench.play import Rounds
from bench.wire import table
from bench.zoo import JOBS
from penstock.choose.prepare import divided_step
from penstock.graph.graph import Graph
from penstock.graph.tensor.cuts import collect_points
from penstock.graph.trace import capture
from penstock.listener import SILENT
from penstock.plan import Plan, plan_by_hand
from penstock.plan.plan import divided
from penstock.profile.measure import measure
from penstock.schedule.grid import InnerAxis
from penstock.search import evaluate

RANKS, DELAY_S = 2, 0.0005
SCHEDULES = "gpipe", "one_f_one_b"
Row = dict[str, float | int | str]


def plans_of(graph: Graph, micro_batches: int) -> list[Plan]:
    """Return for each schedule the plan of one half after the other, and of both in turn."""
    found: list[Plan] = []
    for schedule in SCHEDULES:
        bare = plan_by_hand(graph, [], schedule, num_micro_batches=micro_batches)
        plain = divided(bare, graph, collect_points(graph))
        found += [plain, plain.refined(graph, "woven")]
    return found


def rows(name: str, rate: float, rounds: Rounds) -> Iterator[Row]:
    job = replace(JOBS[name], clip_norm=None)
    captured = divided_step(capture(job), InnerAxis(RANKS), SILENT)
    profile = measure(captured, job, beside=1)
    plans = plans_of(captured.graph, job.micro_batches)
    with line(rate, DELAY_S) as places, tempfile.TemporaryDirectory() as folder:
        cluster = cluster_over(places, Path(folder))
        played = played_over(places, Path(folder), name, plans, rounds)
    kinds = tuple(replace(profile, kind=each.name) for each in cluster.devices)
    found = [evaluate(captured.graph, kinds, cluster, plan)[0] for plan in plans]
    taken = [[block.step_s for block in each.blocks] for each in played]
    for at, (own, expected) in enumerate(zip(taken, found, strict=True)):
        plain = at - at % 2
        yield {
            "model": name,
            "line": f"{rate / 1e6:g} MB/s",
            "schedule": SCHEDULES[at // 2],
            "order": "in turn" if at % 2 else "one after the other",
            "measured_s": statistics.median(own),
            "low_s": min(own),
            "high_s": max(own),
            "predicted_s": expected.step_s,
            "speedup": statistics.median(taken[plain]) / statistics.median(own),
            "predicted_speedup": found[plain].step_s / expected.step_s,
            "peak_bytes": played[at].peak_bytes,
            "predicted_bytes": max(expected.peak_bytes),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one line, few steps")
    parser.add_argument("--rates", nargs="+", type=float, default=[150e6, 50e6], help="bytes/s")
    parser.add_argument("--models", nargs="+", choices=[*JOBS], default=["gpt"])
    parser.add_argument("--rounds", type=int, default=Rounds().turns)
    options = parser.parse_args()
    torch.set_num_threads(1)
    can, why = can_throttle()
    if not can:
        raise SystemExit(f"error: no slow line here: {why}")
    rounds = Rounds(1, 0.1) if options.quick else Rounds(options.rounds)
    found: list[Row] = []
    for name in options.models:
        for rate in options.rates[: 1 if options.quick else None]:
            found += rows(name, rate, rounds)
    print(json.dumps({"machine": machine(), "rows": found}) if options.json else table(found))


if __name__ == "__main__":
    main()
