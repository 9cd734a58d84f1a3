"""What a stage repeats in its backward: nothing, all of F, or what the search finds under a cap.

    python -m bench.recompute [--json] [--quick] [--rounds N] [--ahead]

The GPT of examples/gpt.py as two stages on two ranks, one_f_one_b, 8 micro-batches.  Caps are
between what the fullest rank holds where no stage repeats anything, and where both repeat all; for
each the best plan of whole stages, and the best of any.  All run by turns on the same two ranks
(bench/play.py), from one profile.

way         "none", "all"; under a cap "whole stages" and "any ops"
cap_bytes   what a rank may hold; null: all there is
again       ops that a micro-batch repeats, over all stages; stages of the plan, units included
held_bytes  that F keeps for the backward, of one micro-batch, over all stages
predicted_s, step_s, low_s, high_s    of a step: predicted, median of the turns, least and most
ratio, predicted_ratio                to the step of "none": median of the turns', and predicted
predicted_bytes, measured_bytes       of the rank that holds most
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from bench.machine import machine
from bench.play import Block, Played, Rounds, Traced, ahead
from bench.predict import Model, played_here
from penstock.cli import face
from penstock.cluster import Cluster
from penstock.gauge.links import measure_link
from penstock.graph.graph import Graph
from penstock.graph.trace import capture
from penstock.job import Job, load_job
from penstock.plan import Plan, plan_by_hand
from penstock.plan.lower_plan import stages_of
from penstock.profile import Profile
from penstock.profile.measure import measure
from penstock.search import Fixed, search
from penstock.search.balance import balanced_cuts
from penstock.search.judge import Judge
from penstock.search.recompute import as_needed
from penstock.units import format_bytes, format_seconds

RANKS = 2
PARTS = 0.75, 0.5, 0.25  # of what recompute of all saves, that a rank has less
Row = dict[str, Any]


class Case(NamedTuple):
    """A plan, what it is, and what is predicted of it."""

    way: str
    cap: int | None
    plan: Plan
    predicted_s: float
    predicted_bytes: int


def cases(
    job: Job, graph: Graph, profile: Profile, cluster: Cluster, parts: Sequence[float] = PARTS
) -> Iterator[Case]:
    """Yield the plans; none of whole stages where none fits, or where all or nothing does."""
    plain = plan_by_hand(
        graph,
        balanced_cuts(graph, profile.op_s, RANKS),
        "one_f_one_b",
        num_micro_batches=job.micro_batches,
        clip=job.clip_norm is not None,
    )
    judge = Judge(graph, profile, cluster)

    def case(way: str, cap: int | None, plan: Plan) -> Case:
        made = judge.candidate(plan)
        return Case(way, cap, plan, made.step_s, max(made.peak_bytes))

    none = case("none", None, plain)
    every = case("all", None, plain.changed(recompute=(True,) * RANKS))
    yield from (none, every)
    for part in parts:
        cap = int(
            none.predicted_bytes - (1 - part) * (none.predicted_bytes - every.predicted_bytes)
        )
        tight = cluster.within(cap)
        if (whole := as_needed(Judge(graph, profile, tight), plain)) is not None:
            yield case("whole stages", cap, whole)
        fixed = Fixed(ranks=RANKS, replicas=1, stages=RANKS, schedule="one_f_one_b")
        found = search(
            graph,
            profile,
            tight,
            micro_batches=job.micro_batches,
            clip=plain.agreement.clip,
            fixed=fixed,
        )
        yield case("any ops", cap, found.plan)


def row_of(graph: Graph, found: Case, played: Played, none: Case, free: Played) -> Row:
    """Return a plan's seconds and bytes, beside the predicted ones and those without recompute."""
    stages = stages_of(found.plan, graph).stages
    times, others = ([Block(*b).step_s for b in each.blocks] for each in (played, free))
    again = (set(stage.forward.ops) & set(stage.backward.ops) for stage in stages)
    return {
        "way": found.way,
        "cap_bytes": found.cap,
        "again": sum(map(len, again)),
        "stages": len(stages),
        "held_bytes": sum(stage.forward.change_bytes for stage in stages),
        "predicted_s": found.predicted_s,
        "step_s": statistics.median(times),
        "low_s": min(times),
        "high_s": max(times),
        "ratio": statistics.median(a / b for a, b in zip(times, others, strict=True)),
        "predicted_ratio": found.predicted_s / none.predicted_s,
        "predicted_bytes": found.predicted_bytes,
        "measured_bytes": played.peak_bytes,
    }


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row."""
    lines: list[str] = []
    for row in rows:
        cap = "" if row["cap_bytes"] is None else format_bytes(row["cap_bytes"])
        times = [format_seconds(row[key]) for key in ("predicted_s", "step_s", "low_s", "high_s")]
        sizes = [format_bytes(row[key]) for key in ("predicted_bytes", "measured_bytes")]
        lines.append(
            f"{row['way']:13} {cap:>9}  {row['again']:4} ops, {row['stages']} stages, keeps "
            f"{format_bytes(row['held_bytes']):>8}  {times[0]} / {times[1]} "
            f"({times[2]} - {times[3]})  "
            f"{row['ratio']:.3f}, predicted {row['predicted_ratio']:.3f}  {sizes[0]} / {sizes[1]}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one cap, short rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--ahead", action="store_true", help="on a machine in use: blocks run first (as root)"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = replace(load_job("examples/gpt.py"), clip_norm=None)
    captured = capture(job)
    face.say("measuring every op")
    with ahead(options.ahead):
        cluster = replace(Cluster.here(RANKS), inside=measure_link())
        profile = measure(captured, job, beside=RANKS - 1)
    parts = PARTS[1:2] if options.quick else PARTS
    found = list(cases(job, captured.graph, profile, cluster, parts))
    rounds = Rounds(2, 0.2) if options.quick else Rounds(options.rounds)
    model = Model({1: Traced(job, captured)}, {1: profile})
    played = played_here(model, [each.plan for each in found], rounds._replace(ahead=options.ahead))
    rows = [
        row_of(captured.graph, each, took, found[0], played[0])
        for each, took in zip(found, played, strict=True)
    ]
    print(table(rows), file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        json.dump({"machine": machine(), "rows": rows}, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
