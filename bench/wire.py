"""Packed messages over a slow line: what a step takes with so many bits a number.

    python -m bench.wire [--json] [--quick] [--rounds N] [--rates B/S ...] [--models NAME ...]
    python -m bench.wire --loss [--json] [--quick]

A model of bench/zoo.py in two stages, 1F1B, one rank at each end of a line (bench/network.py) over
gloo; plans that differ only in their bits take turns.  The line is measured as `penstock doctor
--links` does it, ops and packing as a profile.

bits              of a number, of activations and of gradients; 32: as it is
message_bytes     from stage to stage for a micro-batch, there and back
measured_s        a step: median over the turns, lowest and highest
predicted_s       by the simulator
speedup, predicted_speedup    against 32 bits

With --loss: examples/gpt.py is trained in two stages, in threads, and the loss is printed every 30
steps, for each number of bits, from the same weights and batches.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from bench.line import cluster_over, played_over
from bench.machine import machine
from bench.network import can_throttle, line
from bench.play import Rounds
from bench.zoo import JOBS
from penstock.bits import AS_IT_IS
from penstock.cli import face
from penstock.graph.trace import Capture, capture
from penstock.job import Job, load_job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import lower_plan, stages_of
from penstock.profile.measure import measure
from penstock.runtime.run import run
from penstock.search import evaluate
from penstock.search.balance import balanced_cuts

BITS = (AS_IT_IS, 16, 8, 4)
DELAY_S = 0.001
GPT = Path(__file__).parent.parent / "examples" / "gpt.py"
Row = dict[str, float | int | str | list[float]]


def plan_of(job: Job, captured: Capture, bits: int) -> Plan:
    """Return two stages, whose messages have so many bits a number."""
    graph = captured.graph
    cuts = balanced_cuts(graph, [float(node.flop) for node in graph.nodes], 2)
    plan = plan_by_hand(
        graph,
        cuts,
        "one_f_one_b",
        num_micro_batches=job.micro_batches,
        clip=job.clip_norm is not None,
    )
    return plan.changed(wire=(bits, bits), early=1)


def rows(name: str, rate: float, rounds: Rounds) -> Iterator[Row]:
    job = replace(JOBS[name], wire_bits=min(BITS))
    captured = capture(job)
    profile = measure(captured, job, beside=1)
    plans = [plan_of(job, captured, bits) for bits in BITS]
    with line(rate, DELAY_S) as places, tempfile.TemporaryDirectory() as folder:
        cluster = cluster_over(places, Path(folder))
        played = played_over(places, Path(folder), name, plans, rounds)
    kind = cluster.devices[0].name
    predicted = [
        evaluate(captured.graph, replace(profile, kind=kind), cluster, plan)[0].step_s
        for plan in plans
    ]
    taken = [[block.step_s for block in each.blocks] for each in played]
    for plan, own, expected in zip(plans, taken, predicted, strict=True):
        program = lower_plan(plan, captured.graph)
        yield {
            "model": name,
            "line": f"{rate / 1e6:g} MB/s",
            "bits": plan.terms.wire[0],
            "message_bytes": sum(edge.size_bytes for edge in program.edges),
            "measured_s": statistics.median(own),
            "low_s": min(own),
            "high_s": max(own),
            "predicted_s": expected,
            "speedup": statistics.median(taken[0]) / statistics.median(own),
            "predicted_speedup": predicted[0] / expected,
        }


def losses(steps: int, every: int) -> Iterator[Row]:
    """Yield for each number of bits the mean losses of `every` steps after one another."""
    job = replace(load_job(str(GPT)), wire_bits=min(BITS))
    captured = capture(job)
    for bits in BITS:
        plan = plan_of(job, captured, bits)
        program, stages = lower_plan(plan, captured.graph), stages_of(plan, captured.graph)
        found = [
            each.loss or 0.0 for each in run(program, captured, stages, job, num_steps=steps).steps
        ]
        means = [statistics.fmean(found[at : at + every]) for at in range(0, steps, every)]
        yield {"bits": bits, "losses": means}


def table(found: Sequence[Row]) -> str:
    keys = list(found[0])
    cells = [[_shown(row[key]) for key in keys] for row in found]
    return face.table(keys, cells)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return " ".join(f"{each:.3f}" for each in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one line, few steps")
    parser.add_argument("--loss", action="store_true", help="train, and print the losses")
    parser.add_argument("--rates", nargs="+", type=float, default=[20e6, 5e6], help="bytes/s")
    parser.add_argument("--models", nargs="+", choices=[*JOBS], default=["gpt", "cnn"])
    parser.add_argument("--rounds", type=int, default=Rounds().turns)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    if options.loss:
        found = list(losses(*((4, 2) if options.quick else (210, 30))))
    else:
        can, why = can_throttle()
        if not can:
            raise SystemExit(f"error: no slow line here: {why}\nhint: --loss needs none")
        rounds = Rounds(1, 0.1) if options.quick else Rounds(options.rounds)
        for name in options.models[: 1 if options.quick else None]:
            for rate in options.rates[: 1 if options.quick else None]:
                found += rows(name, rate, rounds)
    print(json.dumps({"machine": machine(), "rows": found}) if options.json else table(found))


if __name__ == "__main__":
    main()
