"""Plans cut into one unit for each block, beside the plans whose stages are whole.

    python -m bench.refined [--json] [--quick] [--models NAME ...] [--rounds N] [--ahead]

Two of the networks of bench/zoo.py, both GPTs, on two ranks, under every schedule that trains and
drains; one_f_one_b also with recompute, and as two replicas of one stage.  The plan and its units
(`plan.refined`) are predicted from one profile, schedules that take seconds built for those of
each, then run by turns on the same ranks (bench/play.py).

stages, units       of the plan, and after it is cut
plain_s, refined_s  seconds of a step, the median block
ratio, low, high    refined_s / plain_s: the median of the rounds' ratios, smallest and largest
predicted           the ratio of the predictions
..._bytes           of the rank that holds most: predicted and measured
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from bench.machine import machine
from bench.play import Block, Played, Rounds, Traced, ahead
from bench.predict import Model, played_here
from bench.zoo import JOBS
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.graph import Graph
from penstock.graph.trace import capture
from penstock.job import Job
from penstock.plan import Plan, plan_by_hand
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.schedule import SCHEDULES
from penstock.schedule.recipe import Recipe, built_on, has_window, trains
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.units import format_bytes, format_seconds

RANKS = 2
MODELS = ("gpt", "small gpt")
Row = dict[str, float | int | str]


class Case(NamedTuple):
    """A plan, what it is called, and what is predicted of it: seconds and bytes."""

    name: str
    plan: Plan
    predicted_s: float
    predicted_bytes: int


def plans(job: Job, graph: Graph, profile: Profile) -> Iterator[tuple[str, Plan]]:
    """Yield plans whose stages are whole, with their names."""

    def by_hand(name: str, stages: int, again: bool = False, copies: int = 1) -> Plan:
        return plan_by_hand(
            graph,
            balanced_cuts(graph, profile.op_s, stages),
            name,
            num_micro_batches=job.micro_batches // copies,
            num_ranks=RANKS // copies,
            replicas=copies,
            recompute=(again,) * stages,
            clip=job.clip_norm is not None,
        )

    for recipe in (Recipe(builder.__name__) for builder in SCHEDULES):
        if trains(recipe) and not has_window(recipe):
            sizes = (2 * RANKS, RANKS, RANKS - 1)
            fits = (n for n in sizes if built_on(recipe, n, job.micro_batches, RANKS) is not None)
            stages = next(fits, None)
            if stages is not None and stages <= len(graph.cut_points) + 1:
                yield recipe.name, by_hand(recipe.name, stages)
    yield "one_f_one_b, recompute", by_hand("one_f_one_b", RANKS, True)
    yield "2 replicas", by_hand("one_f_one_b", 1, copies=2)


def pairs(
    job: Job, graph: Graph, profile: Profile, cluster: Cluster
) -> Iterator[tuple[Case, Case]]:
    """Yield each plan and its units, predicted."""
    for name, plan in plans(job, graph, profile):
        judge = Judge(graph, profile, cluster)
        both = [judge.candidate(each) for each in (plan, plan.refined(graph))]
        plain, refined = (Case(name, c.plan, c.step_s, max(c.peak_bytes)) for c in both)
        yield plain, refined


def row_of(network: str, cases: tuple[Case, Case], played: Sequence[Played]) -> Row:
    """Return the measured figures of a plan and its units, beside the predictions of both."""
    plain, refined = cases
    times = [[Block(*block).step_s for block in each.blocks] for each in played]
    ratios = [b / a for a, b in zip(*times, strict=True)]
    return {
        "network": network,
        "schedule": plain.name,
        "stages": plain.plan.num_stages,
        "units": refined.plan.num_stages,
        "plain_s": statistics.median(times[0]),
        "refined_s": statistics.median(times[1]),
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "predicted": refined.predicted_s / plain.predicted_s,
        "plain_predicted_s": plain.predicted_s,
        "refined_predicted_s": refined.predicted_s,
        "plain_bytes": played[0].peak_bytes,
        "refined_bytes": played[1].peak_bytes,
        "plain_predicted_bytes": plain.predicted_bytes,
        "refined_predicted_bytes": refined.predicted_bytes,
        "other": statistics.median(Block(*block).other for each in played for block in each.blocks),
    }


def of_network(name: str, job: Job, cluster: Cluster, rounds: Rounds, most: int) -> Iterator[Row]:
    """Yield the rows of one network; only the first `most` plans."""
    captured = capture(job)
    face.say(f"{name}: measuring every op")
    with ahead(rounds.ahead):
        profile = measure(captured, job, beside=RANKS - 1)
    found = list(itertools.islice(pairs(job, captured.graph, profile, cluster), most))
    model = Model({1: Traced(job, captured)}, {1: profile})
    played = played_here(model, [case.plan for both in found for case in both], rounds)
    for at, both in enumerate(found):
        yield row_of(name, both, played[2 * at : 2 * at + 2])


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row."""
    lines: list[str] = []
    for row in rows:
        times = [format_seconds(float(row[key])) for key in ("plain_s", "refined_s")]
        sizes = [
            format_bytes(int(row[f"{which}{what}_bytes"]))
            for which in ("plain", "refined")
            for what in ("_predicted", "")
        ]
        ratio = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        lines.append(
            f"{row['network']:9} {row['schedule']:24} {row['stages']} -> {row['units']:<3} "
            f"{times[0]:>8} -> {times[1]:>8}  {ratio}, predicted {row['predicted']:.3f}  "
            f"{sizes[0]} / {sizes[1]} -> {sizes[2]} / {sizes[3]}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one model, two plans, short rounds")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ahead", action="store_true", help="on a machine in use: blocks run first (as root)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = MODELS[-1:] if options.quick else options.models
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    rounds = rounds._replace(ahead=options.ahead)
    with ahead(rounds.ahead):
        cluster = replace(Cluster.here(RANKS), inside=measure_link())
    rows: list[Row] = []
    for name in names:
        group = list(of_network(name, JOBS[name], cluster, rounds, 2 if options.quick else 99))
        rows += group
        print(table(group), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=1)
    else:
        print(machine())


if __name__ == "__main__":
    main()
