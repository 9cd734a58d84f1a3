"""2BP with the weight gradients of a step as one product, beside one after another, and 1F1B.

    python -m bench.two_bp [--json] [--quick] [--models NAME ...] [--rounds N] [--ahead]

Networks of bench/zoo.py on two ranks.  All plans are predicted from one profile, then run by turns
on the same ranks (bench/play.py).

batch               micro-batches whose W is one action, of those of a step
products, apart     gradients of weights that are one product, and those that are added up
step_s              seconds of a step, the median block
ratio, low, high    to `two_bp` with batch 1: the median of the rounds' ratios, smallest and largest
of_1f1b             the median ratio to `one_f_one_b`
predicted           the ratio of the predictions
bytes, predicted_bytes   of the rank that holds most
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from bench.machine import machine
from bench.play import Block, Rounds, Traced, ahead
from bench.predict import Model, played_here
from bench.zoo import JOBS
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.graph import Graph
from penstock.graph.joint import joint_of
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.profile.measure import measure
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.units import format_bytes, format_seconds

RANKS = 2
MODELS = ("gpt", "small gpt", "cnn")
Row = dict[str, float | int | str]


def batches(job: Job) -> list[int]:
    """Return the numbers of micro-batches that are compared, 1 first."""
    return [n for n in (1, 2, 4, 8) if n <= job.micro_batches and job.micro_batches % n == 0]


def plans(job: Job, graph: Graph, op_s: Sequence[float]) -> Iterator[tuple[int, Plan]]:
    """Yield each number of micro-batches with its plan; 0: that of 1F1B."""
    cuts = balanced_cuts(graph, op_s, RANKS)
    for batch in (0, *batches(job)):
        name = f"two_bp(batch={batch})" if batch else "one_f_one_b"
        yield (
            batch,
            plan_by_hand(
                graph,
                cuts,
                name,
                num_micro_batches=job.micro_batches,
                num_ranks=RANKS,
                clip=job.clip_norm is not None,
            ),
        )


def counted(plan: Plan, graph: Graph, batch: int) -> tuple[int, int]:
    """Return the number of gradients that are one product, and of those that are not."""
    found = [joint_of(graph, s.weight_gradient, batch) for s in stages_of(plan, graph).stages]
    products = sum(len(one.once.gradients) for one in found) if batch > 1 else 0
    return products, sum(len(s.weight_gradient.gradients) for s in stages_of(plan, graph).stages)


def of_network(name: str, job: Job, cluster: Cluster, rounds: Rounds) -> Iterator[Row]:
    """Yield the rows of one network."""
    captured = capture(job)
    graph = captured.graph
    face.say(f"{name}: measuring every op")
    with ahead(rounds.ahead):
        profile = measure(captured, job, beside=RANKS - 1)
    judge, cases = Judge(graph, profile, cluster), list(plans(job, graph, profile.op_s))
    found = [judge.candidate(plan) for _, plan in cases]
    model = Model({1: Traced(job, captured)}, {1: profile})
    played = played_here(model, [plan for _, plan in cases], rounds)
    times = [[Block(*block).step_s for block in each.blocks] for each in played]
    for at, (batch, plan) in enumerate(cases):
        products, all_ = counted(plan, graph, batch)
        apart = [mine / other for mine, other in zip(times[at], times[1], strict=True)]
        plain = [mine / other for mine, other in zip(times[at], times[0], strict=True)]
        yield {
            "network": name,
            "schedule": str(plan.schedule),
            "batch": batch,
            "products": products,
            "apart": all_ - products,
            "step_s": statistics.median(times[at]),
            "ratio": statistics.median(apart),
            "low": min(apart),
            "high": max(apart),
            "of_1f1b": statistics.median(plain),
            "predicted": found[at].step_s / found[1].step_s,
            "bytes": played[at].peak_bytes,
            "predicted_bytes": max(found[at].peak_bytes),
        }


def line(row: Row) -> str:
    ratio = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
    sizes = (format_bytes(int(row[key])) for key in ("predicted_bytes", "bytes"))
    return (
        f"{row['network']:9} {row['schedule']:16} {row['products']:3} of "
        f"{int(row['products']) + int(row['apart']):3} products  "
        f"{format_seconds(float(row['step_s'])):>8}  {ratio}, predicted {row['predicted']:.3f}, "
        f"of 1F1B {row['of_1f1b']:.3f}  {' / '.join(sizes)}"
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
    names = MODELS[1:2] if options.quick else options.models
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    rounds = rounds._replace(ahead=options.ahead)
    with ahead(rounds.ahead):
        cluster = replace(Cluster.here(RANKS), inside=measure_link())
    rows: list[Row] = []
    for name in names:
        for row in of_network(name, JOBS[name], cluster, rounds):
            rows.append(row)
            print(line(row), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=1)
    else:
        print(machine())


if __name__ == "__main__":
    main()
