"""Plans with their ops compiled, beside the same plans op by op.

    python -m bench.compile [--json] [--quick] [--models NAME ...] [--rounds N] [--ahead]

Networks on two ranks, 1F1B, the cuts that balance their seconds.  Both plans are predicted from one
profile, then run by turns on the same ranks (bench/play.py).

runs, unlike        runs of ops that are compiled as one, and how many of them differ
compile_s           seconds of compiling these, nothing being on disk
eager_s, ours_s     seconds of a step op by op, and compiled: the median block
ratio, low, high    ours to eager: the median of the rounds' ratios, smallest and largest
predicted_s         seconds of a compiled step; predicted: its ratio
pays_after          steps whose gain is as long as compiling takes; None: there is no gain
bytes, predicted_bytes   of the rank that holds most, compiled
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from bench.machine import machine
from bench.models import TINY
from bench.play import Block, Rounds, Traced, ahead
from bench.predict import Model, played_here
from bench.zoo import JOBS
from penstock.choose.fuse import known, segments_of_plan
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.fused_runs import fused_function_of, runs_of
from penstock.graph.trace import Capture, capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile.measure import measure
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.units import format_bytes, format_seconds

RANKS, MICRO_BATCHES = 2, 4
NETWORKS = {"tiny gpt": TINY.job(), **JOBS}
MODELS = ("tiny gpt", "small gpt", "gpt", "cnn")
Row = dict[str, float | int | str | None]


def plans(job: Job, captured: Capture, op_s: Sequence[float]) -> tuple[Plan, Plan]:
    """Return the plan op by op, and compiled."""
    cuts = balanced_cuts(captured.graph, op_s, RANKS)
    clip = job.clip_norm is not None
    plain = plan_by_hand(
        captured.graph, cuts, "one_f_one_b", num_micro_batches=job.micro_batches, clip=clip
    )
    return plain, plain.changed(compiled=True)


def compiled(captured: Capture, plan: Plan) -> Row:
    """Compile what a plan runs; return how much that is, and the seconds."""
    _, segments = segments_of_plan(plan, captured.graph)
    texts = [run.text for segment in segments for run in runs_of(segment, captured)]
    start = time.perf_counter()
    for segment in segments:
        fused_function_of(segment, captured, folder=None)
    seconds = time.perf_counter() - start
    return {"runs": len(texts), "unlike": len(set(texts)), "compile_s": seconds}


def of_network(name: str, cluster: Cluster, rounds: Rounds) -> Row:
    """Return the row of one network."""
    job = replace(NETWORKS[name], micro_batches=MICRO_BATCHES)
    captured = capture(job)
    face.say(f"{name}: measuring every op, and compiling")
    with ahead(rounds.ahead):
        profile = measure(captured, job, beside=RANKS - 1)
        both = plans(job, captured, profile.op_s)
        row = compiled(captured, both[1])
        (profile,) = known(
            job,
            captured,
            both[1],
            (replace(profile, basis=replace(profile.basis, how="measured")),),
        )
    judge = Judge(captured.graph, profile, cluster)
    eager, ours = (judge.candidate(plan, as_said=True) for plan in both)
    model = Model({1: Traced(job, captured)}, {1: profile})
    played = played_here(model, both, rounds)
    times = [[Block(*block).step_s for block in each.blocks] for each in played]
    ratios = [mine / other for other, mine in zip(*times, strict=True)]
    eager_s, ours_s = map(statistics.median, times)
    pays = float(row["compile_s"] or 0.0) / (eager_s - ours_s) if ours_s < eager_s else None
    return {
        "model": name,
        **row,
        "eager_s": eager_s,
        "ours_s": ours_s,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "predicted_s": ours.step_s,
        "predicted": ours.step_s / eager.step_s,
        "pays_after": pays,
        "bytes": played[1].peak_bytes,
        "predicted_bytes": max(ours.peak_bytes),
    }


def line(row: Row) -> str:
    ratio = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    sizes = (format_bytes(int(row[key] or 0)) for key in ("predicted_bytes", "bytes"))
    after = "never" if row["pays_after"] is None else f"{row['pays_after']:,.0f} steps"
    took = (format_seconds(float(row[key] or 0.0)) for key in ("eager_s", "ours_s"))
    return (
        f"{row['model']:9} {row['runs']:3} runs, {row['unlike']:2} unlike, "
        f"{row['compile_s']:4.0f} s  {' -> '.join(took):>20}  {ratio}, "
        f"predicted {row['predicted']:.3f}; pays after {after}  {' / '.join(sizes)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one model, short rounds")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--ahead", action="store_true", help="on a machine in use: blocks run first (as root)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    rounds = rounds._replace(ahead=options.ahead)
    with ahead(rounds.ahead):
        cluster = replace(Cluster.here(RANKS), inside=measure_link())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["XDG_CACHE_HOME"] = folder  # nothing is known of earlier runs
        for name in MODELS[:1] if options.quick else options.models:
            rows.append(of_network(name, cluster, rounds))
            print(line(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=1)
    else:
        print(machine())


if __name__ == "__main__":
    main()
